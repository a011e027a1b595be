"""Weights of extreme size: products that overflow are told by axis and tensor, what a dtype holds is matched in it, and
no translation costs the precision of what it is added to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import symfuse
from contract.tiny import MODELS
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, VerificationError
from symfuse.io import Checkpoint
from symfuse.matching.translations import LONGEST, _least


def made(label: str, seed: int, change: Callable[[str, Tensor], Tensor], dtype: torch.dtype) -> Checkpoint:
    """A tiny model, its weights changed in float64 and then rounded."""
    model = MODELS[label](seed)
    tensors = {n: change(n, t).to(dtype) if t.is_floating_point() else t for n, t in model.items()}
    return symfuse.open(tensors, config=model.config, name=f"{label} {seed}")


def pair(label: str, factor: float, dtype: torch.dtype) -> tuple[Checkpoint, Checkpoint]:
    a, b = (made(label, seed, lambda _, t: t * factor, dtype) for seed in (0, 1))
    return a, b


@pytest.mark.parametrize(
    ("label", "factor", "dtype", "axes", "where", "tensor"),
    [
        ("torch-relu-post", 1e20, torch.float32, "heads,qk", "h[0]", "layers.0.norm2.weight"),
        ("bert", 1e20, torch.float32, "ffn", "ffn[0]", "encoder.layer.0.intermediate.dense.weight"),
        ("bert", 1e20, torch.float32, "residual", "residual", "encoder.layer.1.attention"),
        ("bert", 1e20, torch.float32, "heads", "h[0]", "encoder.layer.0.attention.self.key.weight"),
        ("bert", 1e37, torch.bfloat16, "ffn", "ffn[0]", "encoder.layer.0.intermediate.dense.weight"),
        ("bert", 1e160, torch.float64, "attention", "qk[0]", "encoder.layer.0.attention.self.key.weight"),
        ("torch-relu-post", 1e100, torch.float64, "ffn", "ffn[0]", "layers.0.linear"),
    ],
)
def test_products_that_overflow_are_told_by_axis_tensor_and_dtype(
    label: str, factor: float, dtype: torch.dtype, axes: str, where: str, tensor: str
) -> None:
    a, b = pair(label, factor, dtype)
    summed = "float64" if dtype == torch.float64 else "float32"
    with pytest.raises(CheckpointError) as caught:
        symfuse.match(a, to=b, axes=axes, threads=1)
    message = str(caught.value)
    assert message.startswith(f"{where}: products of these weights overflow in {summed}; the largest weight is ")
    assert f"in '{tensor}" in message
    assert message.endswith("leave this axis out")
    assert ("convert both models to float64" in message) == (dtype != torch.float64)


@pytest.mark.parametrize(("label", "axes"), [("bert", "all"), ("gpt2-lm", "attention,ffn"), ("torch-relu-post", "all")])
def test_what_float64_holds_is_matched_as_if_it_were_small(label: str, axes: str) -> None:
    """Powers of two, so that the products are those of the small pair, bit for bit but for their exponents."""
    small, huge = (symfuse.match(*pair(label, f, torch.float64), axes=axes, biases=False) for f in (1.0, 2.0**100))
    assert huge.elements.keys() == small.elements.keys()
    for instance, element in small.elements.items():
        for key, tensor in element.tensors().items():
            torch.testing.assert_close(huge.elements[instance].tensors()[key], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("label", ["bert", "torch-relu-post"])
def test_translations_of_huge_biases_are_finite(label: str) -> None:
    a, b = pair(label, 1e20, torch.float32)
    found = symfuse.match(a, to=b, axes="attention")
    assert found.shifts
    for name, t in found.shifts.items():
        assert t.isfinite().all(), name
        assert symfuse.match(a, to=b, axes="attention", biases=False)(a).read(name).isfinite().all()
    small = symfuse.match(*pair(label, 1.0, torch.float32), axes="attention")
    assert small.shifts.keys() == found.shifts.keys()


def test_nan_of_an_alignment_is_told_from_overflow_in_the_dtype_of_the_file() -> None:
    a = made("bert", 0, lambda _, t: t, torch.float16)
    name = "encoder.layer.0.attention.self.value.bias"
    found = random_alignment(symfuse.declare(a), 0, axes=["v"])

    def shifted(value: float) -> Alignment:
        return replace(found, shifts={name: torch.full((20,), value, dtype=torch.float64)})

    with pytest.raises(IncompatibleError, match=rf"^{name}: the aligned tensor does not fit in float16, the dtype of"):
        shifted(1e6)(a)[name]
    for value in (torch.nan, torch.inf):
        for read in (Checkpoint.__getitem__, Checkpoint.read):
            with pytest.raises(
                IncompatibleError, match=rf"^{name}: the aligned tensor holds NaN or infinity before it"
            ):
                read(shifted(value)(a), name)


@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize("axes", ["attention", "all"])
def test_a_translation_costs_no_precision(axes: str, scaling: bool) -> None:
    """Biases of an anchor a thousand times the source's: translations onto them would drown the source's values."""
    a = made("gpt2-lm", 0, lambda _, t: t, torch.float16)
    b = made("gpt2-lm", 1, lambda n, t: t * 3000 if "c_attn" in n else t, torch.float16)
    found = symfuse.match(a, to=b, axes=axes, scaling=scaling, starts=1)
    proof = symfuse.prove(a, found)
    assert proof.exact.worst < 1e-12
    assert proof.rounding < 5e-3


def test_only_the_heads_of_which_a_translation_would_be_too_long_stay() -> None:
    a = made("bert", 0, lambda _, t: t, torch.float64)
    biases = {f"encoder.layer.0.attention.self.{kind}.bias": 3 for kind in ("key", "value")}  # of 4 heads, the last

    def far(name: str, tensor: Tensor) -> Tensor:
        if name in biases:
            tensor = tensor.clone()
            tensor.view(4, 5)[biases[name]] += 1000 * LONGEST
        return tensor

    b = made("bert", 0, far, torch.float64)
    found = symfuse.match(a, to=b, axes="attention", scaling=False)
    assert not found.shifts  # the others are as they are, and nothing is gained by a compromise of them
    near = made("bert", 0, lambda n, t: far(n, t) + 0.5 * (n in biases), torch.float64)
    shifts = symfuse.match(a, to=near, axes="attention", scaling=False).shifts
    assert shifts.keys() == biases.keys()
    for t in shifts.values():
        heads = t.view(4, 5)
        assert not heads[3].any()
        assert heads[:3].any(1).all()
    torch.testing.assert_close(shifts[min(biases)].view(4, 5)[:3], torch.full((3, 5), 0.5, dtype=torch.float64))


def test_a_least_translation_that_is_no_number_is_none() -> None:
    wanted = torch.ones(3, 2, dtype=torch.float64)
    found, _ = _least(
        torch.full((6, 4), 1e200, dtype=torch.float64), wanted, torch.ones(4).double(), lambda t: t.norm(dim=-1)
    )
    assert not found.any()


def test_a_model_that_magnifies_rounding_is_not_said_to_be_moved_wrongly() -> None:
    noise = torch.Generator().manual_seed(0)  # far below a norm's eps, which magnifies its rounding a million times
    a = made(
        "bert",
        0,
        lambda _, t: 0.3 + 1e-12 * torch.randn(t.shape, generator=noise, dtype=torch.float64),
        torch.float64,
    )
    with pytest.raises(VerificationError, match=r"Changes in the last bit of its own weights.*--no-verify"):
        symfuse.prove(a, symfuse.match(a, to=MODELS["bert"](1), axes="attention"))
    sane = MODELS["bert"](0)
    name = "encoder.layer.0.attention.output.dense.bias"  # from which only what values bring may be taken
    right = symfuse.match(sane, to=MODELS["bert"](1), axes="attention", biases=False)
    broken = replace(right, shifts={name: torch.arange(20, dtype=torch.float64)})
    with pytest.raises(VerificationError, match=r"nothing was written$"):
        symfuse.prove(sane, broken)
