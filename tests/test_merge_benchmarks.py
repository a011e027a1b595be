"""The models that merging is measured on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import symfuse

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import merging  # type: ignore[import-not-found]

    yield merging
    for name in ("merging", "_models", "_harness"):
        sys.modules.pop(name, None)


@pytest.fixture
def tiny(merging: ModuleType) -> object:
    return merging.Shape(hidden=8, ffn=12, layers=2, heads=2, kv_heads=1, vocab=16)


def test_models_are_made_once_and_are_fine_tunes(merging: ModuleType, tiny: object, tmp_path: Path) -> None:
    models = merging.make(tmp_path / "m", tiny)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "m").rglob("*.*")}
    assert len(times) > 6
    merging.make(tmp_path / "m", tiny)
    assert times == {path: path.stat().st_mtime_ns for path in times}
    base, a, b = (symfuse.open(models[name]) for name in ("base", "a", "b"))
    assert {n: a.info(n).shape for n in a} == tiny.shapes()  # type: ignore[attr-defined]
    assert {a.info(n).dtype for n in a} == {torch.bfloat16}
    name = "model.layers.0.mlp.up_proj.weight"
    for one, other in ((base, a), (base, b), (a, b)):
        same = (one[name] == other[name]).double().mean()
        assert 0.1 < same < 0.95


def test_large_models_are_sharded(
    merging: ModuleType, tiny: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "SHARD", 600)
    models = merging.make(tmp_path, tiny)
    assert len(merging.weights([models["a"]])) > 2
    assert len(symfuse.open(models["a"])) == len(tiny.shapes())  # type: ignore[attr-defined]


def test_sizes_are_what_the_page_says(merging: ModuleType) -> None:
    assert [shape.gigabytes for shape in merging.SIZES] == pytest.approx([0.1, 0.35, 1.1], rel=0.25)
    assert len(merging.MANY.shapes()) == 1497
    assert merging.MANY.gigabytes < 0.01


def test_both_tools_have_the_same_recipe(merging: ModuleType, tiny: object, tmp_path: Path) -> None:
    models = merging.make(tmp_path, tiny)
    for method, recipe in merging.recipes(tmp_path).items():
        read = [str(models[name]) for name in ("a", "b", "base")[: merging.INPUTS.get(method, 3)]]
        assert {one for one in read if one in str(recipe)} == set(read), method
        merged = symfuse.merge_recipe(recipe)
        assert set(merged) == set(tiny.shapes())  # type: ignore[attr-defined]
