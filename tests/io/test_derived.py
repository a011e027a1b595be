"""What is computed from checkpoints: read before it is rounded, cast, told apart by lineage, never written over."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contract.tiny import MODELS, encoder
from matched import match
from symfuse import api
from symfuse.alignment import random_alignment
from symfuse.errors import CheckpointError, OutputError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.checkpoint import SAMPLED

HALF = [torch.bfloat16, torch.float16]
MATCHED = {"qk", "v", "ffn"}


def whole(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- read


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_read_is_float32_at_least_and_exact(dtype: torch.dtype) -> None:
    model = encoder(0).to(dtype)
    for name in model:
        assert model[name].dtype == dtype
        assert model.read(name).dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(model.read(name).double(), model[name].double())


def test_read_keeps_integers_and_refuses_nan() -> None:
    a = encoder(0)
    name = "layers.0.norm1.bias"
    counts = a.replace(tensors={**a, name: torch.arange(20)})
    assert counts.read(name).dtype == torch.int64
    broken = a.replace(tensors={**a, name: torch.full((20,), torch.nan)}, name="broken")
    with pytest.raises(CheckpointError, match=rf"{name}' of broken holds 20 NaN"):
        broken.read(name)


@pytest.mark.parametrize("dtype", HALF)
def test_computed_tensors_are_read_before_they_are_rounded(dtype: torch.dtype) -> None:
    source = MODELS["bert-mlm"]().to(dtype)
    g = random_alignment(api.declare(source), 1, MATCHED)
    moved, exact = g(source), g(source.to(torch.float64))
    differing = 0
    for name in moved:
        wide = moved.read(name).double()
        assert torch.equal(wide, exact[name])
        torch.testing.assert_close(moved[name].double(), wide, rtol=torch.finfo(dtype).eps, atol=1e-6)
        differing += int((wide != moved[name].double()).sum())
    assert differing > 1000


# ---- other dtypes


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_to_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    a = MODELS["bert-mlm"]()
    cast = a.to(dtype)
    assert list(cast) == list(a)
    for name in a:
        assert cast.info(name).dtype == cast[name].dtype == dtype
        assert cast.info(name).shape == a.info(name).shape
        assert torch.equal(cast[name], a[name].to(dtype))
    again = open_checkpoint(cast.save(tmp_path / "cast"))
    assert all(torch.equal(again[name], cast[name]) for name in cast)


def test_casting_takes_the_values_before_rounding_and_leaves_integers() -> None:
    name = "layers.0.norm1.bias"
    a = encoder(0)
    a = a.replace(tensors={**a, name: torch.arange(20)})
    assert a.to(torch.bfloat16)[name].dtype == torch.int64
    source = encoder(1).to(torch.bfloat16)
    moved = random_alignment(api.declare(source), 1, MATCHED)(source)
    wide = moved.to(torch.float32)
    for key in moved:
        assert torch.equal(wide[key], moved.read(key).float())
    assert any(not torch.equal(wide[key], moved[key].float()) for key in moved)


# ---- lineage


def test_lineage_tells_models_apart(tmp_path: Path) -> None:
    folders = [MODELS["bert-mlm"](seed).save(tmp_path / str(seed)) for seed in (0, 1)]
    first, second = (open_checkpoint(folder).lineage() for folder in folders)
    assert first == open_checkpoint(folders[0]).lineage()
    assert first == {"name": "0", "folder": str(folders[0]), "sha256": first["sha256"], "sha256_of": SAMPLED}
    assert re.fullmatch("[0-9a-f]{64}", first["sha256"])
    assert first["sha256"] != second["sha256"]
    other = open_checkpoint(MODELS["bert-mlm"](0).to(torch.float32).save(tmp_path / "cast")).lineage()
    assert other["sha256"] != first["sha256"]
    elsewhere = open_checkpoint(MODELS["bert-mlm"](0).save(tmp_path / "copy")).lineage()
    assert elsewhere["sha256"] == first["sha256"]


def test_the_lineage_of_what_is_computed_reads_nothing() -> None:
    a, b = encoder(0), encoder(1)

    def never(self: Mapping[str, Tensor], name: str) -> Tensor:
        raise AssertionError(f"{name} was read")

    merged = api.merge([a, b])
    lineage = merged.lineage()
    assert lineage["folder"] is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(merged), "__getitem__", never)
        assert merged.lineage() == lineage


# ---- sources


def test_sources_are_all_folders_that_are_read(tmp_path: Path) -> None:
    folders = [MODELS["bert-mlm"](seed).save(tmp_path / str(seed)) for seed in range(3)]
    a, b, c = map(open_checkpoint, folders)
    assert a.sources == (folders[0],)
    assert encoder().sources == ()
    g = match(a, b)
    assert g(a).sources == (folders[0],)
    merged = api.merge([g(a), b, c])
    assert set(merged.sources) == set(folders)
    for derived in (merged.to(torch.float32), merged.replace(name="x"), api.merge([merged, a])):
        assert set(derived.sources) == set(folders)


@pytest.mark.parametrize("base", [0, 1])
def test_no_source_is_ever_written_into(tmp_path: Path, base: int) -> None:
    folders = [MODELS["bert-mlm"](seed).save(tmp_path / "ab"[seed]) for seed in (0, 1)]
    (tmp_path / "link").symlink_to(folders[1])
    g = match(*folders)
    before = whole(tmp_path)
    results: list[Checkpoint] = [
        api.merge(folders, base=base),
        api.merge([g(folders[0]), folders[1]], base=base),
        api.merge(folders, base=base).to(torch.float32),
        api.merge(folders, base=base, heads="drop").replace(name="other"),
    ]
    for result, target in itertools.product(results, [*folders, tmp_path / "link"]):
        with pytest.raises(OutputError, match="is the input"):
            result.save(target, overwrite=True)
        with pytest.raises(OutputError, match="inside the input"):
            result.save(target / "inside", overwrite=True)
        assert whole(tmp_path) == before
    with pytest.raises(OutputError, match="holds the input"):
        results[0].save(tmp_path, overwrite=True)
    assert whole(tmp_path) == before
    results[0].save(tmp_path / "out")


# ---- C72: one rounding


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("label", ["torch-relu-post", "bert-mlm", "gpt2-lm"])
def test_c72_a_merge_of_aligned_half_precision_is_rounded_once(label: str, dtype: torch.dtype) -> None:
    a, b = (MODELS[label](seed).to(dtype) for seed in (0, 1))
    g = match(a, b)
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    for weights in ([0.5, 0.5], [0.3, 0.7]):
        merged = api.merge([g(a), b], weights=weights)
        exact = api.merge([g(wide_a), wide_b], weights=weights)
        twice = api.merge([Checkpoint(dict(g(a)), a.config, name="rounded"), b], weights=weights)
        wrong = [name for name in merged if not torch.equal(merged[name], exact[name].to(dtype))]
        assert not wrong, [(n, (merged[n] != exact[n].to(dtype)).sum().item()) for n in wrong]
        assert any(not torch.equal(twice[name], merged[name]) for name in merged)
