"""The plan for scale (benchmarks/costs.py, docs/scale.md): models of published sizes, and tasks on machines."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
FOLDER = str(ROOT / "benchmarks")
NAMES = ("costs", "scale", "_harness")


@pytest.fixture(scope="module")
def scale() -> Iterator[ModuleType]:
    """Imported as if it was run; other tests have modules of these names."""
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, FOLDER)
    yield importlib.import_module("scale")
    sys.path.remove(FOLDER)
    for name in NAMES:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture(scope="module")
def costs(scale: ModuleType) -> ModuleType:
    return sys.modules[scale.spend.__module__]


def constants(costs: ModuleType, **more: Any) -> Any:
    """Round figures; nothing is resident before the work."""
    merged = {"linear": 1e-9, "ties": 2e-9}
    rates = {"floats": 1e11, "doubles": 5e10, "svd": 2e-3, "assigned": 2.0, "units": 14336, "power": 2.0}
    each = {"matched": 0.0, "moved": 1e-9, "merged": merged, "proved": 1e-8, "began": 5.0, "resident": 0}
    return costs.Constants(**rates | each | more)


# ---- shapes

WEIGHTS = {  # as they are published, in units of 10⁹
    "Llama 3 8B": 8.03, "Llama 3 70B": 70.55, "Llama 3 405B": 405.85, "Mixtral 8x22B": 140.62,
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_models_have_their_published_sizes(costs: ModuleType, name: str) -> None:
    infos = costs.SHAPES[name].infos
    assert round(sum(info.numel for info in infos.values()) / 1e9, 2) == WEIGHTS[name]


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe"])
def test_tensors_are_those_of_the_real_class(costs: ModuleType, kind: str, tmp_path: Path) -> None:
    """A small one of each kind, with a layer without experts where there may be one."""
    more = {"llama": {}, "mixtral": {"experts": 4}, "qwen3_moe": {"experts": 4, "dense": 1, "wide": 40}}[kind]
    shape = costs.Shape(kind, 32, 3, 24, 4, 2, 50, head=8, **more)
    config = transformers.AutoConfig.for_model(**shape.config())
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    import symfuse

    saved = symfuse.open(tmp_path)
    assert {name: saved.info(name).shape for name in saved} == {n: info.shape for n, info in shape.infos.items()}
    model, chosen = costs.declared(shape)
    assert {model.spec.file_name(name) for name in model.spec.tensors}
    assert len(chosen.groups) == 3 * 3  # queries with keys, values, neurons of each layer
    whole = {costs._in_memory(name) for name in shape.infos}
    assert len(whole) == len(model.spec.tensors)


def test_work_is_that_of_its_formulas(costs: ModuleType) -> None:
    """Of one layer by hand: three products of all neurons with all; what nobody can read off is assigned."""
    shape, c = costs.Shape("llama", 4096, 1, 14336, 32, 8, 1000), constants(costs)
    related, apart = (costs.matching(shape, c, related=r) for r in (True, False))
    assert max(t.seconds for t in related) == pytest.approx(3 * 2 * 14336**2 * 4096 / 1e11)
    assert sum(t.seconds for t in apart) - sum(t.seconds for t in related) == pytest.approx(2.0)
    assert sum(t.read for t in related) == 2 * 2 * (3 * 14336 * 4096 + 2 * (32 + 8) * 128 * 4096)
    layer = 3 * 14336 * 4096 + 2 * (32 + 8) * 128 * 4096 + 2 * 4096
    assert costs.proof(shape, c).seconds == pytest.approx(1e-8 * layer)
    size = sum(info.nbytes for info in shape.infos.values())
    for files in (False, True):
        moved = costs.moving(shape, c, files)
        assert sum(t.written for t in moved) == sum(t.read for t in moved) == size
        merged = costs.merging(shape, c, "ties", 3, files)
        assert sum(t.read for t in merged) == 3 * size
        assert sum(t.seconds for t in merged) == pytest.approx(2e-9 * 4 * size)


def test_who_writes_some_of_a_stack_moves_all_of_it(costs: ModuleType) -> None:
    shape, c = replace(costs.SHAPES["256 experts, 670B"], layers=6), constants(costs)
    threads, tasks = costs.moving(shape, c, False), costs.moving(shape, c, True)
    assert sum(t.written for t in threads) == sum(t.written for t in tasks)
    assert sum(t.read for t in threads) == sum(t.written for t in threads)
    assert sum(t.read for t in tasks) > 2 * sum(t.written for t in tasks)


# ---- machines


def test_memory_is_what_lets_tasks_run_at_once(costs: ModuleType) -> None:
    c = constants(costs)
    tasks = [costs.Task(10.0, 6, 0)] * 4
    assert costs.spend(tasks, costs.Cluster(1, 4, 100.0), c).seconds == 10
    few = costs.spend(tasks, costs.Cluster(1, 4, 13.0), c)
    assert (few.seconds, few.memory, few.limit) == (20, 12, "memory")
    assert costs.spend(tasks, costs.Cluster(1, 4, 1.0), c).seconds == 40  # one at a time, whatever it takes
    assert costs.spend(tasks, costs.Cluster(4, 4, 1.0), c).seconds == 10
    resident = costs.spend(tasks, costs.Cluster(1, 4, 13.0), constants(costs, resident=5))
    assert (resident.seconds, resident.memory) == (40, 11)


def test_a_store_is_shared(costs: ModuleType) -> None:
    c, tasks = constants(costs), [costs.Task(1.0, 0, 10**10, 10**10)] * 8
    each = costs.Cluster(1, 8, 1e9, disk=1e9, store=4e9)
    for machines, seconds in ((1, 160.0), (2, 80.0), (4, 40.0), (8, 40.0)):
        found = costs.spend(tasks, replace(each, machines=machines), c)
        assert (found.seconds, found.limit) == (seconds, "disk")


lengths = st.lists(st.integers(1, 100).map(float), min_size=1, max_size=20)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(lengths, st.integers(1, 4), st.integers(1, 4))
def test_no_schedule_is_quicker_than_it_can_be(
    costs: ModuleType, times: list[float], machines: int, cores: int
) -> None:
    """At least the longest task and all the work shared out; at most the sum of both (Graham 1966)."""
    found = costs.spend([costs.Task(t, 0, 0) for t in times], costs.Cluster(machines, cores, 1e9), constants(costs))
    share = sum(times) / (machines * cores)
    assert max(max(times), share) <= found.seconds * (1 + 1e-9)
    assert found.seconds <= (share + max(times)) * (1 + 1e-9)
    assert found.busy == pytest.approx(sum(times))


# ---- the page


@pytest.mark.slow
def test_the_page_is_what_its_data_make(scale: ModuleType, costs: ModuleType) -> None:
    """Else: python benchmarks/scale.py --write."""
    text, data = scale.PAGE.read_text("utf-8"), json.loads(costs.DATA.read_text("utf-8"))
    assert scale.paged(text, data) == text
    other = {**data, "constants": {**data["constants"], "floats": 3 * data["constants"]["floats"]}}
    assert scale.paged(text, other) != text
    found = costs.Constants(**data["constants"])
    for row in data["rows"]:
        seconds, _ = scale.predicted(costs.Shape(**row["shape"]), row["kind"], found)
        assert 0.5 < row["cpu"] / seconds < 2, "the page promises that"


# ---- the command


def test_constants_come_from_a_file(costs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert costs.Constants.load(str(costs.DATA)).merged.keys() == {"linear", "ties"}
    kept = json.loads(costs.DATA.read_text("utf-8"))["constants"]
    file = tmp_path / "file"
    wrong = {
        "": "expected JSON, found something else (Expecting value",
        "[": "expected JSON, found something else (Expecting value",
        "[]": "expected an object, found []",
        "{}": "expected an object with 'constants', found {}",
        '{"constants": 3}': "constants: expected an object, found 3",
        json.dumps({"constants": {**kept, "floats": 0}}): "constants: floats: expected a number above 0, found 0",
        json.dumps({"constants": {**kept, "svd": "x"}}): "constants: svd: expected a number from 0 on, found 'x'",
        json.dumps({"constants": {**kept, "merged": {}}}): "constants: merged: expected an object with 'linear'",
    }  # fmt: skip
    for text, says in wrong.items():
        file.write_text(text)
        assert refused(costs, str(file), capsys).startswith(f"argument --constants: {str(file)!r}: {says}")
    for place in (str(tmp_path), str(tmp_path / "none"), ""):
        said = refused(costs, place, capsys)
        assert said.startswith(f"argument --constants: {place!r}: expected a file of JSON, found none that can be read")


def refused(costs: ModuleType, place: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says why."""
    with pytest.raises(SystemExit) as left:
        costs.main(["--constants", place])
    said = capsys.readouterr()
    assert left.value.code == 2
    assert not said.out
    line = said.err.rpartition(": error: ")[2]
    assert line.count("\n") == 1
    return line.rstrip("\n")
