"""The benchmark of merging, on models of a few kilobytes: it runs, and what it measures is a merge."""

from __future__ import annotations

import json
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
    sys.modules.pop("merging")


@pytest.fixture
def tiny(merging: ModuleType) -> object:
    return merging.Shape(hidden=8, ffn=12, layers=2, heads=2, kv_heads=1, vocab=16)


def test_models_are_made_once_and_are_fine_tunes(merging: ModuleType, tiny: object, tmp_path: Path) -> None:
    models = merging.make(tmp_path / "m", tiny)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "m").rglob("*.*")}
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
    assert len(merging.weight_files([models["a"]])) > 2
    assert len(symfuse.open(models["a"])) == len(tiny.shapes())  # type: ignore[attr-defined]


def test_every_row_runs_and_leaves_nothing(merging: ModuleType, tiny: object, tmp_path: Path) -> None:
    models = merging.make(tmp_path / "m", tiny)
    bench = merging.Bench(tmp_path, cold=True)
    tasks = merging.method_tasks(bench, models, peer=False)
    assert {name.split(", ")[1] for name in tasks if name.startswith("symfuse, ")} == set(merging.recipes(models))
    chosen = {name: task for name, task in tasks.items() if name.startswith("floor") or "linear" in name}
    assert len(chosen) == 7
    runs = merging.interleave(chosen, 1)
    assert all(run.cpu > 0 and run.peak > 10**6 for found in runs.values() for run in found)
    assert not (tmp_path / "out").exists()
    lines = list(merging.plain_table(runs))
    assert len(lines) == 8


def test_a_failing_command_is_an_error(merging: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        merging.run([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize("kind", ["direct", "buffered"])
def test_the_floor_writes_as_much_as_a_merge(merging: ModuleType, kind: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(9 * 2**20 + 17))
    merging.run(
        [
            sys.executable,
            BENCHMARKS / "_floor.py",
            kind,
            tmp_path / "out",
            str(9 * 2**20 + 17),
            *map(tmp_path.joinpath, "ab"),
        ]
    )
    assert 0 <= (tmp_path / "out").stat().st_size - (9 * 2**20 + 17) < 2**16


def test_tables(merging: ModuleType) -> None:
    fast, slow = merging.Run(1.0, 2.0, 10**8), merging.Run(4.0, 6.0, 10**9)
    runs = {
        "floor, 2, direct": [merging.Run(0.5, 0.1, 10**7)],
        "symfuse, linear, 1": [fast, fast, slow],
        "mergekit, linear, 1": [slow],
        "symfuse, linear, all": [fast],
    }
    head, row, alone = merging.methods_table(runs)
    assert row == "| linear | 1 | 2.00 | 6.00 | 3.0 | 1.00 | 4.00 | 4.0 | 1000 | 1000 | 2.00 |"
    assert alone.count("|") == row.count("|") == head.splitlines()[0].count("|")


def test_many_tensors_hold_as_much_as_few(merging: ModuleType) -> None:
    few, many = (
        sum(torch.Size(dims).numel() for dims in shape.shapes().values()) for shape in (merging.FEW, merging.MANY)
    )
    assert abs(few / many - 1) < 0.3
    assert (len(merging.FEW.shapes()), len(merging.MANY.shapes())) == (147, 1497)
    assert json.dumps(merging.environment())
