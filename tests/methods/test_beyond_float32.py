"""Models of half precision are merged in float32, and in float64 where that does not hold what is on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import symfuse
from symfuse.errors import IncompatibleError
from symfuse.io import Checkpoint
from symfuse.merging import Merged
from symfuse.merging.stream import PIECE

LARGE = 3e38


def stored(folder: Path, *tensors: Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Checkpoint]:
    """Models of these tensors, in files. Before each is another: the type checks of the tests look into mappings."""
    folder.mkdir(exist_ok=True)
    models = [
        Checkpoint({"a": torch.zeros(1, dtype=dtype), "w": tensor.to(dtype)}, {"model_type": "none"}, name="m")
        for tensor in tensors
    ]
    return [symfuse.open(model.save(folder / str(number))) for number, model in enumerate(models)]


def saved(merged: Checkpoint, folder: Path) -> Tensor:
    """The merged tensor as it is written, which is as it is read."""
    written = symfuse.open(merged.save(folder))["w"]
    assert torch.equal(written, merged["w"])
    return written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("weights", "expected"), [((1.0, 1.0), 0.0), ((3.0, 1.0), LARGE / 2), ((1.0, 3.0), -LARGE / 2)], ids=str
)
def test_a_mean_of_large_entries(tmp_path: Path, weights: Sequence[float], expected: float, dtype: torch.dtype) -> None:
    """Their difference is larger than float32 holds."""
    models = stored(tmp_path, torch.tensor([LARGE, 1.0]), torch.tensor([-LARGE, 1.0]))
    merged = symfuse.merge(models, weights=weights, dtype=dtype)
    torch.testing.assert_close(
        saved(merged, tmp_path / "out").float(), torch.tensor([expected, 1.0]), rtol=0.004, atol=0
    )


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_only_what_needs_it_is_wider(tmp_path: Path, method: str) -> None:
    """Of three blocks the second has such an entry; the first has the bits of a merge in which there is none."""
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, PIECE, generator=g).bfloat16() for _ in range(3)]
    how: dict[str, Any] = {} if method == "linear" else {"base": 0}
    plain = symfuse.merge(stored(tmp_path / "plain", *tensors), method=method, **how)["w"]
    tensors[0][1, 7], tensors[1][1, 7] = LARGE, -LARGE
    merged = symfuse.merge(models := stored(tmp_path / "large", *tensors), method=method, **how)
    assert isinstance(merged.tensors, Merged)
    assert [b.dtype for b in merged.tensors.blocks("w")] == [torch.float32, torch.float64, torch.float64]
    found = saved(merged, tmp_path / "out")
    assert found.isfinite().all()
    assert torch.equal(found[0], plain[0])
    if method == "linear":
        exact = torch.stack([model["w"].double() for model in models]).mean(0)
        torch.testing.assert_close(found.double(), exact, rtol=0.004, atol=0.001)


@pytest.mark.parametrize("method", ["ties", "dare_ties", "dare_linear", "breadcrumbs_ties"])
@pytest.mark.parametrize("weight", [[1, 1e-50], [1e-50, 1e-50], [1e-40, 1e-40], [3e38, 3e38]], ids=str)
def test_weights_that_float32_does_not_hold(tmp_path: Path, method: str, weight: list[float]) -> None:
    """As from models of float64."""
    how: dict[str, Any] = {"base": 0, "parameters": {"density": 0.9, "weight": weight, "normalize": True}}
    base, *changed = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, -1.0, 0.0]])
    half, double = (
        saved(
            symfuse.merge(stored(tmp_path / name, base, *changed, dtype=dtype), method=method, **how),
            tmp_path / f"{name} out",
        )
        for name, dtype in (("half", torch.bfloat16), ("double", torch.float64))
    )
    torch.testing.assert_close(half.double(), double, rtol=0.004, atol=1e-30)
    assert double[1] > 0.4 or (method == "dare_linear" and weight[0] == 1)


def test_what_is_too_large_is_refused_all_the_same(tmp_path: Path) -> None:
    models = stored(tmp_path, torch.tensor([LARGE]), torch.tensor([LARGE]))
    merged = symfuse.merge(models, weights=[1.0, 1.0], parameters={"normalize": False})
    with pytest.raises(
        IncompatibleError, match=r"^w: values from 6.0\d+e\+38 .* do not fit in bfloat16, .*smaller weights"
    ):
        merged.save(tmp_path / "out")
    largest = torch.tensor([1e308], dtype=torch.float64)
    wide = stored(tmp_path / "wide", largest, largest, dtype=torch.float64)
    with pytest.raises(IncompatibleError, match=r"^w: the merge does not fit in torch.float64; take smaller weights"):
        symfuse.merge(wide, weights=[1.0, 1.0], parameters={"normalize": False}).save(tmp_path / "out")
