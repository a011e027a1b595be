"""The benchmarks run, one case of each from end to end; their figures are what they say; and docs/benchmarks.md is what
their data make."""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symfuse import api

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OWN = {path.stem for path in BENCHMARKS.glob("*.py")}
NAMES = (
    "startup", "assignment", "attention", "feed_forward", "sweep", "applying", "alignment", "merging", "moments",
    "learning", "barrier", "fisher", "regmean",
)  # fmt: skip
PROCESSES = ("startup", "alignment", "merging")  # which start Python again and again


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports modules of the folder as if they were run from it; other folders have a run.py too."""
    before = {name: sys.modules.pop(name) for name in OWN & sys.modules.keys()}
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    # Before each timing, which is long where a test run has all libraries in memory.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    yield import_module
    for name in OWN & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def harness(load: Any) -> ModuleType:
    return load("_harness")  # type: ignore[no-any-return]


@pytest.fixture
def pages(load: Any) -> ModuleType:
    return load("_page")  # type: ignore[no-any-return]


# -- every benchmark -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OWN))
def test_it_is_imported(load: Any, name: str) -> None:
    module = load(name)
    assert module.__doc__
    assert name.startswith("_") or hasattr(module, "BENCHMARK") or callable(module.main)


def test_all_are_listed(load: Any) -> None:
    assert load("run").NAMES == NAMES
    assert {name for name in OWN if hasattr(load(name), "BENCHMARK")} == set(NAMES)


def measured(load: Any, name: str, work: Path, number: int, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """One quick case, of which everything that the benchmark names is there."""
    harness, benchmark = load("_harness"), load(name).BENCHMARK
    case = list(benchmark.cases(harness.Plan(True, work)))[number]
    found = harness.measure(benchmark, case, 1, 1, enough=0.0, without=without)
    rows = {row["row"] for row in found["rows"]}
    named = {
        benchmark.ours,
        benchmark.floor,
        *benchmark.peers,
        *(row for goal in benchmark.goals for row in (goal.row, goal.base)),
    }
    assert named - set(without) <= rows | ({"mergekit", "mergekit-yaml --help"} - rows)
    for row in found["rows"]:
        assert row["wall"] > 0, row
        assert row["cpu"] >= 0, row
        assert len(row["rounds"]["wall"]) == len(row["rounds"]["cpu"]) == 1
        if row["row"] != benchmark.floor and benchmark.floor is not None:
            assert row[f"over {benchmark.floor}"]["wall"] > 0
    assert json.loads(json.dumps(found)) == found
    assert list(load("_page").table(benchmark, [found]))
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PROCESSES])
def test_one_case_runs(load: Any, name: str, tmp_path: Path) -> None:
    measured(load, name, tmp_path, 0)


def test_one_case_of_processes_runs(load: Any, tmp_path: Path) -> None:
    """And what is written is gone."""
    found = measured(load, "merging", tmp_path, 0, without=("mergekit",))
    assert {row["row"] for row in found["rows"]} == {"plain reading and writing", "… through the page cache", "symfuse"}
    assert all(row["peak"] is not None for row in found["rows"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_one_case_of_processes_runs_with_peers(load: Any, name: str, tmp_path: Path) -> None:
    measured(load, name, tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"), [("sweep", -1), ("sweep", -2), ("moments", -1), ("learning", -1), ("learning", -2)]
)
def test_other_models_run(load: Any, name: str, number: int, tmp_path: Path) -> None:
    assert measured(load, name, tmp_path, number)["rows"]


def test_goals_are_for_cases_that_there_are(load: Any, tmp_path: Path) -> None:
    plan = load("_harness").Plan(False, tmp_path)
    for name in NAMES:
        benchmark = load(name).BENCHMARK
        cases = list(benchmark.cases(plan))
        for goal in benchmark.goals:
            assert any({**case.sizes, **case.setting}.items() >= goal.where.items() for case in cases), (name, goal)


def test_sizes_grow_along_a_cross(load: Any, tmp_path: Path) -> None:
    """So that every benchmark but that of the start has its exponents."""
    pages, plan = load("_page"), load("_harness").Plan(False, tmp_path)
    for name in NAMES[1:]:
        cases = load(name).BENCHMARK.cases(plan)
        data = [{"sizes": case.sizes, "setting": case.setting, "threads": 1, "rows": []} for case in cases]
        grown = {one.size for one in pages.series(data)}
        assert grown in ({"width", "layers"}, {"n"}, {"GB"}), name


@pytest.mark.parametrize("kind", ["independent", "fine-tune", "unbalanced"])
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_pairs_are_models_of_their_family(load: Any, kind: str, family: str) -> None:
    models = load("_models")
    source, anchor = models.pair(getattr(models, family)(128, 1), kind)
    assert source.spec.family == anchor.spec.family == family
    assert {i.axis for i in source.spec.movable} >= {"qk", "v", "ffn"}
    assert any(not torch.equal(source.read(name), anchor.read(name)) for name in source.spec.tensors)


def test_scores_of_the_assignment_benchmark(load: Any) -> None:
    for kind in ("independent", "correlated", "fine-tune"):
        x, y = load("assignment").features(kind, 64)
        assert x.shape == y.shape
        assert len(x) == 64


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_the_floor_of_a_sweep_has_all_its_axes(load: Any, family: str) -> None:
    """Of a post-norm model with a pooler, and of a pre-norm one, whose residual stream is rotated."""
    models, sweep = load("_models"), load("sweep")
    ready = sweep.Ready.of(*models.pair(getattr(models, family)(128, 2), "independent"))
    matched = {instance.axis: group.name for instance, group in ready.problem.groups.items()}
    assert matched.keys() == {"residual", "h", "qk", "v", "ffn"} | ({"pool"} if family == "roberta" else set())
    assert matched["residual"] == ("permutation" if family == "roberta" else "centred")


def test_a_folder_is_made_once_and_anew_if_it_is_another(load: Any, tmp_path: Path) -> None:
    models, made = load("_models"), []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "file").write_text("x")

    for wanted in ({"n": 1}, {"n": 1}, {"n": 2}):
        assert (models.once(tmp_path / "deep" / "m", wanted, make) / "file").read_text() == "x"
    assert len(made) == 2
    (tmp_path / "deep" / "m.made.json").unlink()  # as if it had been cut off
    models.once(tmp_path / "deep" / "m", {"n": 2}, make)
    assert len(made) == 3


# -- timing ----------------------------------------------------------------------------------------


def clocked(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]
) -> tuple[dict[str, Any], list[str]]:
    """Rows that take so many seconds of a clock of their own, and what was run."""
    now, said = [0.0], list[str]()
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(harness.time, "process_time", lambda: 2 * now[0])

    def row(name: str) -> Any:
        def run() -> None:
            said.append(name)
            now[0] += seconds[name]

        return run

    return {name: row(name) for name in seconds}, said


def test_rounds_run_all_rows_in_new_orders(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, said = clocked(harness, monkeypatch, {"a": 1.0, "b": 2.0, "c": 0.5})
    runs = harness.interleave(rows, 8, enough=0.0)
    rounds = [said[i : i + 3] for i in range(0, len(said), 3)]
    assert len(rounds) == 9  # with the warm-up
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(map(tuple, rounds))) > 2
    assert [took.wall for took in runs["b"]] == [2.0] * 8
    assert [took.cpu for took in runs["b"]] == [4.0] * 8


def test_what_is_slow_is_run_once(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"quick": 1.0, "slow": harness.SLOW + 1, "peer": harness.SLOW_PEER + 1, "other": harness.SLOW_PEER + 1}
    rows, said = clocked(harness, monkeypatch, seconds)
    runs = harness.interleave(rows, 3, peers=["peer"], enough=0.0)
    assert {name: said.count(name) for name in rows} == {"quick": 4, "slow": 1, "peer": 1, "other": 4}
    assert [took.wall for took in runs["slow"]] == [harness.SLOW + 1]
    assert {name: len(found) for name, found in runs.items()} == {"quick": 3, "slow": 1, "peer": 1, "other": 3}


@pytest.mark.parametrize(
    ("seconds", "count", "rounds"), [(0.5, 1, 6), (0.001, 1, 30), (4.9, 1, 4), (4.9, 3, 2), (4.9, 9, 1)]
)
def test_quick_rows_have_more_rounds_and_long_ones_fewer(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: float, count: int, rounds: int
) -> None:
    """Of four that are asked for."""
    rows, _ = clocked(harness, monkeypatch, {str(number): seconds for number in range(count)})
    assert len(harness.interleave(rows, 4, enough=3.0)["0"]) == rounds


def test_what_starts_afresh_has_no_warm_up(harness: ModuleType) -> None:
    rows = {"a": lambda: harness.Took(1.0, 2.0, 3)}
    assert harness.interleave(rows, 4, warm=False, enough=0.0) == {"a": [harness.Took(1.0, 2.0, 3)] * 4}


@pytest.mark.parametrize(("before", "peak"), [(700, 300), (1100, 0), (None, None)])  # None: not Linux
def test_memory_beside_what_lies_ready(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, before: int | None, peak: int | None
) -> None:
    monkeypatch.setattr(harness, "_resident", lambda: before)
    monkeypatch.setattr(harness, "_memory", {"VmHWM": 1000}.__getitem__)
    assert harness.timed(lambda: None, memory=True).peak == peak
    assert harness.timed(lambda: None).peak is None


def test_parts_that_follow_each_other(harness: ModuleType) -> None:
    assert harness.Took(1, 2, 30) + harness.Took(0.5, 0.25, 40) == harness.Took(1.5, 2.25, 40)
    assert harness.Took(1, 2) + harness.Took(1, 2, 4) == harness.Took(2, 4, 4)


def test_a_process(harness: ModuleType) -> None:
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    took = harness.process([sys.executable, "-S", "-c", code], threads=3)
    assert took.wall > 0
    assert took.cpu > 0
    assert took.peak is not None
    with pytest.raises(RuntimeError, match=r"ended with 3:\ntold"):
        harness.process([sys.executable, "-c", "print('told'); raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="KeyError"):  # none is set where none is asked for
        harness.process([sys.executable, "-c", code])


@pytest.mark.parametrize("how", ["direct", "buffered"])
def test_the_floor_writes_as_much_as_a_merge(harness: ModuleType, how: str, tmp_path: Path) -> None:
    size = 9 * 2**20 + 17
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(size))
    inputs = [tmp_path / name for name in "ab"]
    harness.process([sys.executable, BENCHMARKS / "_copy.py", how, tmp_path / "out", str(size), *inputs])
    assert 0 <= (tmp_path / "out").stat().st_size - size < 2**16


def test_ratios_are_of_rounds(harness: ModuleType) -> None:
    assert harness.ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0  # the slow round is slow for both
    assert harness.ratio([50.0], [1.0, 5.0, 10.0]) == 10.0
    assert harness.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3)
    assert harness.spread([7.0]) == 0.0


def test_the_environment_has_a_commit(harness: ModuleType) -> None:
    found = harness.environment()
    assert {"commit", "cores", "load", "processor", "symfuse", "torch", "mergekit"} <= found.keys()
    assert json.dumps(found)


# -- words and tables ------------------------------------------------------------------------------


def case(width: int, rows: dict[str, tuple[list[float], list[float]]], kind: str = "independent") -> dict[str, Any]:
    made = [
        {"row": name, "wall": sorted(wall)[len(wall) // 2], "cpu": sorted(cpu)[len(cpu) // 2], "spread": 0.0,
         "peak": 10**6 * len(name), "rounds": {"wall": wall, "cpu": cpu}}
        for name, (wall, cpu) in rows.items()
    ]  # fmt: skip
    return {"sizes": {"width": width}, "setting": {"pair": kind}, "threads": 1, "load": 0.5, "rows": made}


@given(st.floats(-3, 3), st.floats(0.01, 100), st.lists(st.integers(1, 10**6), min_size=3, max_size=6, unique=True))
def test_exponents_of_power_laws(power: float, factor: float, sizes: list[int]) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from _page import exponent  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert exponent(sizes, [factor * size**power for size in sizes]) == pytest.approx(power, abs=1e-6)


def test_series_keep_all_else(pages: ModuleType) -> None:
    cases = [case(w, {"ours": ([1.0], [float(w**2)]), "floor": ([1.0], [3.0 * w])}) for w in (4, 1, 2)]
    cases += [case(w, {"ours": ([1.0], [1.0])}, "fine-tune") for w in (1, 2)]
    (one,) = pages.series(cases)
    assert (one.size, one.label, [c["sizes"]["width"] for c in one.cases]) == ("width", "independent", [1, 2, 4])
    assert one.exponent("ours") == pytest.approx(2)
    assert one.exponent("floor") == pytest.approx(1)
    assert one.exponent("peer") is None
    assert one.exponent(None) is None


@pytest.mark.parametrize(
    ("bound", "least", "says"),
    [
        (3.0, False, "met"), (2.0, False, "**missed** in 1 of 2"), (1.0, False, "**missed**"),
        (1.5, True, "met"), (2.0, True, "**missed** in 1 of 2"), (4.0, True, "**missed**"),
    ],
)  # fmt: skip
def test_verdicts(harness: ModuleType, pages: ModuleType, bound: float, least: bool, says: str) -> None:
    cases = [case(w, {"ours": ([9.0], [ratio]), "floor": ([1.0], [1.0])}) for w, ratio in ((1, 1.5), (2, 3.0))]
    goal = harness.Goal("ours", "floor", bound, least=least)
    verdict = pages.judge(goal, cases)
    assert verdict.says == says
    assert verdict.worst[1] == (1.5 if least else 3.0)


def test_goals_are_judged_where_they_are_for(harness: ModuleType, pages: ModuleType) -> None:
    rows = {"ours": ([2.0, 4.0], [1.0, 1.0]), "floor": ([1.0, 1.0], [1.0, 1.0])}
    cases = [case(1, rows), case(2, rows), case(1, rows, "fine-tune")]
    by_clock = harness.Goal("ours", "floor", 2.9, by="wall", where={"width": 1, "pair": "independent"})
    (found,) = pages.judge(by_clock, cases).found
    assert found == (cases[0], 3.0)
    assert pages.judge(harness.Goal("ours", "floor", 2, where={"width": 9}), cases).says == "not measured"
    assert pages.judge(harness.Goal("peer", "floor", 2), cases).says == "not measured"
    assert pages.judge(harness.Goal("ours", "floor", 2, by="peak"), cases).worst[1] == 4 / 5


def made_up(harness: ModuleType) -> tuple[dict[str, Any], dict[str, Any]]:
    goals = (harness.Goal("ours", "floor", 1.2), harness.Goal("peer", "ours", 4, least=True, by="wall"))
    one = harness.Benchmark("A thing", "What it is.", lambda plan: iter(()), "ours", "floor", ("peer",), goals)  # noqa: ARG005
    rows = lambda w: {"floor": ([1.0], [w]), "ours": ([2.0], [1.1 * w]), "peer": ([6.0], [9.0 * w])}  # noqa: E731
    data = {
        "benchmark": "thing", "environment": harness.environment(), "rounds": 3, "command": "run thing", "seconds": 4.0,
        "cases": [case(w, rows(float(w))) for w in (1, 2, 4)],
    }  # fmt: skip
    return {"thing": one, "other": replace(one, title="Other")}, {"thing": data}


def test_a_page(harness: ModuleType, pages: ModuleType) -> None:
    text = pages.page(*made_up(harness), None)
    assert "Of 4 goals 1 are met in all cases to which they apply, 0 in some, 1 in none; 2 were not measured." in text
    assert "| [A thing](#a-thing) | ours ≤ 1.2 × floor | **1.10** | 2.00 | met |" in text
    assert "| [A thing](#a-thing) | peer ≥ 4 × ours | 8.18 | **3.00** | **missed** |" in text
    assert "- A thing: peer takes 3.00 × ours at worst (independent, width 1), 33% short of the goal of 4." in text
    assert "| A thing | independent | width 1 to 4 | 1.00 | 1.00 | 1.00 |" in text
    assert "| independent | 1 | floor (floor) | 1 |  | 1 | 5 |  |  |  |  |" in text
    assert "|  |  | peer | 6 |  | 9 | 4 | 6.00 | 9.00 | 3.00 | 8.18 |" in text
    assert "Profiles" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = [line.count("|") for line in tables]
    heads = [i for i, line in enumerate(tables) if line.startswith("|---") or line.startswith("|--:")]
    for at, until in zip(heads, [*(head - 1 for head in heads[1:]), len(tables)], strict=True):
        assert len(set(widths[at - 1 : until])) == 1


def test_a_page_of_profiles(harness: ModuleType, pages: ModuleType) -> None:
    side = lambda seconds, rows: {"commit": "abc", "seconds": seconds, "rows": rows}  # noqa: E731
    before = side(4.0, [{"function": "f", "calls": 3, "own": 2.5}])
    after = side(2.0, [{"function": "g", "calls": 1, "own": 0.5}, {"function": "f", "calls": 1, "own": 0.25}])
    profiled = {
        "command": "profiles", "most": 5, "environment": harness.environment(),
        "jobs": {"Job": {"before": before, "after": after}},
    }  # fmt: skip
    text = pages.page(*made_up(harness), profiled)
    assert "Before (abc): 4.0 CPU s under the profiler; after (abc): 2.0 s, 2.0 times less." in text
    assert "| `f` | 2.50 | 3 | 0.25 | 1 |\n| `g` | – | – | 0.50 | 1 |" in text


def test_the_page_is_what_the_data_make(load: Any) -> None:
    run = load("run")
    assert run.PAGE.read_text("utf-8") == run.page(run.DATA), "not of its data: python benchmarks/run.py --write"


def test_data_are_of_benchmarks(load: Any) -> None:
    run = load("run")
    assert {path.stem for path in run.DATA.glob("*.json")} <= {*NAMES, run.PROFILES, "scale"}  # docs/scale.md
    for name, data in run.kept(run.DATA).items():
        assert data["benchmark"] == name
        assert "--quick" not in data["command"]


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def two(load: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run.py with two benchmarks, the second of which is interrupted."""
    run, harness = load("run"), load("_harness")

    def cases(plan: Any) -> Iterator[Any]:
        yield harness.Case(
            {"n": 3}, {"quick": str(plan.quick)}, lambda threads: {"ours": lambda: sum(range(1000 * threads))}
        )

    def interrupted(plan: Any) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    made = {
        "first": harness.Benchmark("First", "Sums.", cases, "ours"),
        "second": harness.Benchmark("Second", "Nothing.", interrupted, "ours"),
    }
    monkeypatch.setattr(run, "NAMES", tuple(made))
    monkeypatch.setattr(run, "benchmark", made.__getitem__)
    return run  # type: ignore[no-any-return]


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_is_finished(two: ModuleType, tmp_path: Path) -> None:
    options = ["--quick", "--data", str(tmp_path / "data"), "--work", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        two.main([*options, "--threads", "1,2"])
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["first.json"]
    found = two.kept(tmp_path / "data")["first"]
    assert [one["threads"] for one in found["cases"]] == [1, 2]
    assert found["command"].endswith("first --quick")
    two.main(["--write", "--data", str(tmp_path / "data")])
    text = (tmp_path / "data" / "benchmarks.md").read_text("utf-8")
    assert "| quick | n | threads |  | wall s |" in text
    assert "## Second" not in text


def test_quick_runs_leave_the_data_alone(two: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in two.DATA.glob("*")}
    two.main(["first", "--quick", "--rounds", "2", "--work", str(tmp_path)])
    assert "## First" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in two.DATA.glob("*")} == before
    with pytest.raises(SystemExit):
        two.main(["third"])
    assert "no benchmark is called third; there are first, second" in capsys.readouterr().err


def refused(main: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says why, after how it is to be called."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(arguments)
    said = capsys.readouterr()
    assert left.value.code == 2
    assert not said.out
    usage, _, line = said.err.rpartition(": error: ")
    assert usage.startswith("usage: ")
    assert line.count("\n") == 1
    return line.rstrip("\n")


@pytest.fixture
def unmeasured(load: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run.py that must not come as far as to measure."""
    run = load("run")
    for name in ("compile_all", "run"):
        monkeypatch.setattr(run, name, lambda *a, **k: pytest.fail("it measures"))  # noqa: ARG005
    return run  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", ""])
def test_rounds_are_from_one_on(unmeasured: ModuleType, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(unmeasured.main, ["startup", "--quick", f"--rounds={value}"], capsys)
    assert said == f"argument --rounds: expected a whole number from 1 on, found {value!r}"


@pytest.mark.parametrize("value", ["0", "-2", "x", "1,", "", "1,0"])
def test_threads_are_from_one_on(unmeasured: ModuleType, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(unmeasured.main, ["startup", "--quick", f"--threads={value}"], capsys)
    assert said == f"argument --threads: expected whole numbers from 1 on, such as 1,2, found {value!r}"


@pytest.mark.parametrize("option", ["--data", "--work"])
def test_folders_are_tried_before_measuring(
    unmeasured: ModuleType, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "x"):
        said = refused(unmeasured.main, ["startup", "--quick", "--work", str(tmp_path), option, str(place)], capsys)
        assert said.startswith(f"argument {option}: expected a folder to write to, found {str(place)!r} (")


def spoilt(data: Any) -> Iterator[tuple[str, Any]]:
    """JSON data with one part of another kind or left out, each part in turn, and where that is."""
    if isinstance(data, dict | list):
        for key in data if isinstance(data, dict) else range(len(data)):
            for at, inner in spoilt(data[key]):
                copy = data.copy()
                copy[key] = inner
                yield f": {key}{at}", copy
        if isinstance(data, dict):
            for key in data:
                yield "", {name: value for name, value in data.items() if name != key}
    yield "", [data] if isinstance(data, int | str) else None


@pytest.mark.parametrize("name", ["first", "profiles"])
def test_data_that_no_page_is_made_of(two: ModuleType, harness: ModuleType, name: str, tmp_path: Path) -> None:
    """Whatever is spoilt, it is the file and the place in it that is told, or a page is made nevertheless."""
    rows = [{"function": "f", "calls": 3, "own": 2.5}]
    jobs = {"Job": {when: {"commit": "abc", "seconds": 4.0, "rows": rows} for when in ("before", "after")}}
    profiled = {"command": "profiles", "most": 5, "environment": harness.environment(), "jobs": jobs}
    data = profiled if name == "profiles" else made_up(harness)[1]["thing"]
    file, told = tmp_path / f"{name}.json", dict[str, str]()
    file.write_text(json.dumps(data))
    assert "ours" in two.page(tmp_path) or "## Profiles" in two.page(tmp_path)
    for at, other in spoilt(json.loads(file.read_text())):
        file.write_text(json.dumps(other))
        try:
            two.page(tmp_path)
        except harness.Unfit as error:
            told[str(error)] = f"{str(file)!r}{at}: expected "
    assert len(told) > 30
    assert all(said.startswith(start) for said, start in told.items()), told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "expected JSON, found something else (Expecting property name"),
        ("", "expected JSON, found something else (Expecting value"),
        ("\udcff", "expected JSON, found something else ('utf-8' codec can't decode"),
        pytest.param("[" * 100_000, "expected JSON, found something else (maximum recursion", id="deep"),
        ("[]", "expected an object, found []"),
        ("{}", "expected an object with 'environment', found {}"),
    ],
)
def test_a_page_of_what_is_no_data_is_refused(
    two: ModuleType, text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    said = refused(two.main, ["--write", "--data", str(tmp_path)], capsys)
    assert said.startswith(f"argument --data: {str(tmp_path / 'first.json')!r}: {says}")
    assert not (tmp_path / "benchmarks.md").exists()


def test_a_page_needs_a_folder(two: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "nothere"
    said = refused(two.main, ["--write", "--data", str(place)], capsys)
    assert said == f"argument --data: expected a folder with data, found none at {str(place)!r}"
    assert not place.exists()
    (place / "benchmarks.md").mkdir(parents=True)
    said = refused(two.main, ["--write", "--data", str(place)], capsys)
    assert said == (
        f"argument --data: expected a file to write to, found {str(place / 'benchmarks.md')!r} (Is a directory)"
    )


@pytest.mark.parametrize("value", ["NaN", "1e999", "-1", "true", "null", '"3"'])
def test_what_is_no_number_in_json(harness: ModuleType, value: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(f'{{"x": [1, {value}]}}')
    for kind in (harness.NUMBER, harness.ABOVE, harness.COUNT):
        with pytest.raises(harness.Unfit, match=f"a': x: 1: expected {kind.words}, found "):
            harness.read_json(tmp_path / "a", {"x": [kind]})


# -- profiles --------------------------------------------------------------------------------------


def test_profiles_count_all_threads(load: Any) -> None:
    import threading

    def work() -> None:
        sorted(random.random() for _ in range(20000))

    def job() -> None:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = load("profiles").profiled(job)
    rows = {row["function"]: row for row in found["rows"]}
    assert rows["builtins.sorted"]["calls"] == 3
    assert 0 < rows["builtins.sorted"]["own"] <= found["seconds"] + 0.1
    assert threading.Thread.run.__module__ == "threading"
    assert not any("/" in name for name in rows)


@pytest.mark.parametrize(
    ("file", "name", "said"),
    [
        ("home/x/src/symfuse/groups/base.py", "best", "symfuse.groups.base.best"),
        ("home/symfuse/src/symfuse/cli.py", "main", "symfuse.cli.main"),
        ("x/site-packages/yaml/loader.py", "load", "yaml.loader.load"),
        ("x/site-packages/torch/nn.py", "f", "torch.nn.f"),
        ("lib/python3.11/threading.py", "wait", "threading.wait"),
        ("<frozen importlib._bootstrap>", "acquire", "importlib._bootstrap.acquire"),
        ("~", "<built-in method torch.mm>", "torch.mm"),
        ("~", "<method 'lerp_' of 'torch._C.TensorBase' objects>", "method 'lerp_' of 'torch._C.TensorBase' objects"),
    ],
)
def test_profiles_name_no_folder(load: Any, file: str, name: str, said: str) -> None:
    assert load("profiles")._named(file, name) == said


@pytest.mark.slow
def test_profiles_of_two_versions(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here both are this one."""
    profiles, run = load("profiles"), load("run")
    options = ["--before", str(BENCHMARKS.parent), "--quick", "--work", str(tmp_path / "work"), "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["profiles.py", *options])
    profiles.main()
    found = json.loads((tmp_path / "profiles.json").read_text("utf-8"))
    for versions in found["jobs"].values():
        assert all(versions[when]["seconds"] > 0 and versions[when]["rows"] for when in ("before", "after"))
    assert "## Profiles before and after" in run.page(tmp_path)


# -- scale -----------------------------------------------------------------------------------------


def test_what_the_scale_benchmark_plants_is_found(load: Any, tmp_path: Path) -> None:
    scale = load("scale")
    shape = scale.llama(256, 1, vocab=50, head=32)
    models, planted = scale.make(tmp_path, shape, "planted")
    found = scale.recovered(api.match(models["source"], models["anchor"], axes="attention,ffn"), planted)
    assert found["neurons"] == 1
    assert 1e-6 < max(found["turns"], found["factors"]) < 0.1
    other = api.match(models["anchor"], models["anchor"], axes="attention,ffn")
    with pytest.raises(KeyError):  # nothing is moved
        scale.recovered(other, planted)
    models, planted = scale.make(tmp_path, shape, "independent")
    assert planted is None
    assert api.relate(models["source"], models["anchor"]).distance.cosine < 0.9


def test_the_scale_benchmark_fits_laws(load: Any) -> None:
    scale = load("scale")
    rows = [
        {"kind": "planted", "width": w, "layers": n, "cpu": 5 + n * w**2.5, "wall": 1 + n * w, "peak": 1e9 * w}
        for w in (2, 4, 8) for n in (1, 2, 4)
    ]  # fmt: skip
    text = "\n".join(scale.growth(rows))
    assert "width^2.50, over the two largest as width^2.50" in text
    assert "as depth^1.00, peak as depth^0.00" in text
    assert "32 layers of width 8" in text
    assert scale.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


@pytest.fixture
def quick(load: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[tuple[int, int, str]]]:
    """scale.py with made-up figures in the place of measured ones, and what it was to measure."""
    scale, costs = load("scale"), load("costs")
    kept, asked = json.loads(costs.DATA.read_text("utf-8")), list[tuple[int, int, str]]()

    def measure(work: Path, shape: Any, kind: str, options: Any) -> dict[str, Any]:
        assert work.is_dir()
        asked.append((shape.width, shape.layers, kind))
        return {**kept["rows"][0], "kind": kind, "width": shape.width, "layers": shape.layers}

    def constants(work: Path, *, quick: bool) -> Any:
        assert work.is_dir()
        assert quick
        return costs.Constants.of(kept["constants"])

    monkeypatch.setattr(scale, "measure", measure)
    monkeypatch.setattr(scale, "constants", constants)
    return scale, asked


def test_the_scale_benchmark_makes_its_folders_and_resumes(
    quick: tuple[ModuleType, list[tuple[int, int, str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale, asked = quick
    file = tmp_path / "new" / "data" / "scale.json"
    options = ["--quick", "--work", str(tmp_path / "new" / "work"), "--json", str(file), "--resume", "--widths", "512"]
    scale.main([*options, "--layers", "1"])
    assert asked == [(512, 1, "planted"), (512, 1, "independent")]
    data = json.loads(file.read_text())
    data["constants"]["another"] = 1  # of another version
    file.write_text(json.dumps(data))
    scale.main([*options, "--layers", "1,2"])
    assert asked[2:] == [(512, 2, "planted"), (512, 2, "independent")]
    assert len(json.loads(file.read_text())["rows"]) == 4
    assert "| planted | 512 | 2 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--widths", "512,0", "expected whole numbers from 1 on, such as 1,2, found '512,0'"),
        ("--widths", "-5", "expected whole numbers from 1 on, such as 1,2, found '-5'"),
        ("--widths", "512,x", "expected whole numbers from 1 on, such as 1,2, found '512,x'"),
        ("--widths", "512,7", "expected multiples of 128, found 7"),
        ("--layers", "0,-1", "expected whole numbers from 1 on, such as 1,2, found '0,-1'"),
        ("--layers", "", "expected whole numbers from 1 on, such as 1,2, found ''"),
        ("--work", "{file}", "expected a folder to write to, found '{file}' (File exists)"),
        ("--work", "{file}/x", "expected a folder to write to, found '{file}/x' (Not a directory)"),
        ("--json", "{file}/x", "expected a folder to write to, found '{file}' (File exists)"),
        ("--json", "{folder}", "expected a file to write to, found '{folder}' (Is a directory)"),
        ("--json", "{folder}/" + 300 * "x", "expected a file to write to, found '{folder}/xxx"),
        ("--resume", "{", "'{file}': expected JSON, found something else (Expecting property name"),
        ("--resume", "[]", "'{file}': expected an object, found []"),
        ("--resume", "{}", "'{file}': expected an object with 'environment', found {}"),
    ],
)  # fmt: skip
def test_the_scale_benchmark_says_what_is_wrong_before_it_measures(
    quick: tuple[ModuleType, list[tuple[int, int, str]]],
    option: str,
    value: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scale, asked = quick
    (tmp_path / "work").mkdir()
    file = tmp_path / "file"
    file.write_text(value)

    def fill(text: str) -> str:
        return text.replace("{file}", str(file)).replace("{folder}", str(tmp_path))

    chosen = ["--resume", "--json", str(file)] if option == "--resume" else [f"{option}={fill(value)}"]
    said = refused(scale.main, ["--quick", "--work", str(tmp_path / "work"), *chosen], capsys)
    assert said.startswith(f"argument {option}: {fill(says)}")
    assert not asked
    assert {path.name for path in tmp_path.iterdir()} == {"work", "file"}
    assert file.read_text() == value


def test_the_scale_page_is_made_of_nothing_else(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Than of data as they should be, which those that are kept are; else the page is as it was."""
    scale, before = load("scale"), load("scale").PAGE.read_bytes()
    assert load("_harness").read_json(scale.DATA, scale.WANTED)["rows"]
    monkeypatch.setattr(scale, "DATA", tmp_path / "none")
    said = refused(scale.main, ["--write"], capsys)
    assert said.startswith(f"argument --write: {str(tmp_path / 'none')!r}: expected a file of JSON, found none")
    assert scale.PAGE.read_bytes() == before
