"""Runs at the same time: into different targets each makes what it makes alone; into one target one of them wins, and
each of the others gets one clear error. In threads of one process and in processes."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import symfuse
from endurance.long_runs import Forks, contents, models, save_small
from symfuse.errors import OutputError, SymfuseError
from symfuse.io import target
from symfuse.io.target import write_text

REFUSALS = re.compile(r"out exists; choose another output|another run is writing this output: it holds the lock of")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return models(tmp_path_factory.mktemp("models"), layers=2)


def at_once(works: Mapping[Any, Callable[[], object]]) -> dict[Any, Exception | None]:
    """All of them in threads that begin together; by their names what they raised."""
    begin = threading.Barrier(len(works))
    found: dict[Any, Exception | None] = {}

    def run(name: Any, work: Callable[[], object]) -> None:
        begin.wait(60)
        try:
            work()
            found[name] = None
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=item) for item in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ties": {"base": 0, "parameters": {"density": 0.3}},
    "dare_ties": {"base": 0, "parameters": {"density": 0.3}},
    "karcher": {},
}


def merged(folders: list[Path], method: str) -> symfuse.Checkpoint:
    given = [symfuse.open(folder) for folder in folders]
    given[1] = symfuse.match(given[1], to=given[0], axes="attention")(given[1])
    return symfuse.merge(given, method=method, **METHODS[method])


# ---- different targets


def test_threads_with_targets_of_their_own(tmp_path: Path, folders: list[Path]) -> None:
    before = torch.get_num_threads()
    expected = {method: contents(merged(folders, method).save(tmp_path / "alone" / method)) for method in METHODS}
    place = tmp_path / "new" / "place"
    works = {method: (lambda m=method: merged(folders, m).save(place / m)) for method in METHODS}
    assert at_once(works) == dict.fromkeys(METHODS)
    assert {method: contents(tmp_path / "new" / "place" / method) for method in METHODS} == expected
    assert {path.name for path in (tmp_path / "new" / "place").iterdir()} == METHODS.keys()
    assert torch.get_num_threads() == before


MORE = ("--align", "attention", "--no-verify")


def command(folders: list[Path], out: Path, method: str, *more: str) -> list[str]:
    base = [] if method in ("linear", "karcher") else ["--base", str(folders[0])]
    given = ["--set", "density=0.3"] if base else []
    return ["merge", *map(str, folders), "-o", str(out), "--method", method, *base, *given, "-q", *more]


def test_processes_with_targets_of_their_own(tmp_path: Path, folders: list[Path], forks: Forks) -> None:
    for where in ("alone", "together"):
        started = []
        for method in METHODS:
            started.append(forks.start(f"main({command(folders, tmp_path / where / method, method, *MORE)})"))
            if where == "alone":
                assert started[-1].wait() == 0
        assert [process.wait() for process in started] == [0] * len(METHODS), forks.log.read_text("utf-8")
    for method in METHODS:
        alone, together = (contents(tmp_path / where / method) for where in ("alone", "together"))
        assert without_times(alone) == without_times(together)
    assert {path.name for path in (tmp_path / "together").iterdir()} == METHODS.keys()


def without_times(found: dict[str, bytes]) -> dict[str, object]:
    """What a run takes is not what it makes."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(one) for key, one in value.items() if key not in ("seconds", "peak_memory")}
        return [kept(one) for one in value] if isinstance(value, list) else value

    return {**found, "symfuse.json": kept(json.loads(found["symfuse.json"]))}


# ---- one target


def the_winner(results: Mapping[int, Exception | None]) -> int:
    """Of the runs without --overwrite, of which exactly one succeeds; the others say why not in one line."""
    [winner] = [name for name, error in results.items() if error is None]
    for error in results.values():
        assert error is None or (isinstance(error, OutputError) and REFUSALS.search(str(error)))
    return winner


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "resume the same": {"resume": True, "fingerprint": "same"},
    "resume others": {"resume": True, "fingerprint": "of {seed}"},
}


def save(kind: str, out: Path, seed: int) -> None:
    save_small(out, seed, **{k: v.format(seed=seed) if isinstance(v, str) else v for k, v in KINDS[kind].items()})


@pytest.mark.parametrize("kind", KINDS)
def test_threads_with_one_target(tmp_path: Path, kind: str) -> None:
    for number in range(12):
        out = tmp_path / str(number) / "out"
        works = {seed: partial(save, kind, out, seed) for seed in range(3)}
        winner = the_winner(at_once(works))
        save_small(tmp_path / "expected", winner, overwrite=True)
        assert contents(out) == contents(tmp_path / "expected")
        assert list(out.parent.iterdir()) == [out]


def test_threads_that_replace_one_target(tmp_path: Path) -> None:
    """One after the other may succeed; whichever was last, the folder is wholly its own."""
    save_small(tmp_path / "out", 9)
    expected = []
    for seed in range(3):
        save_small(tmp_path / "expected", seed, overwrite=True)
        expected.append(contents(tmp_path / "expected"))
    for _ in range(12):
        works = {seed: partial(save_small, tmp_path / "out", seed, overwrite=True) for seed in range(3)}
        errors = [error for error in at_once(works).values() if error is not None]
        assert len(errors) < 3
        assert all(isinstance(error, OutputError) and REFUSALS.search(str(error)) for error in errors)
        assert contents(tmp_path / "out") in expected
        assert {path.name for path in tmp_path.iterdir()} == {"out", "expected"}


@pytest.mark.parametrize("between", ["listed", "looked into"])
def test_a_target_that_is_replaced_while_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """The check sees the folder of one run, and while it looks at its files another run puts its own there."""
    out, patched = tmp_path / "out", {"listed": "entries", "looked into": "others_than_model"}[between]
    save_small(out, 0)
    save_small(tmp_path / "newer", 1)
    original, calls = getattr(target, patched), []

    def replaced(folder: Path) -> list[Any]:
        calls.append(folder)
        if len(calls) > 1:
            return original(folder)
        found = original(folder) if between == "listed" else []
        out.rename(tmp_path / "old")
        if between == "listed":
            return found  # and then its config.json is not there
        (tmp_path / "newer").rename(out)
        raise FileNotFoundError(folder)

    monkeypatch.setattr(target, patched, replaced)
    target.check_target(out, overwrite=True)
    assert calls
    monkeypatch.undo()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(OutputError, match="not a model folder"):
        target.check_target(tmp_path / "other", overwrite=True)


@pytest.mark.parametrize("flags", [pytest.param([], marks=pytest.mark.slow), ["--resume"]], ids=["plain", "resume"])
def test_processes_with_one_target(tmp_path: Path, folders: list[Path], forks: Forks, flags: list[str]) -> None:
    out = tmp_path / "run" / "out"
    expected = {}
    for method in METHODS:
        assert forks.start(f"main({command(folders, tmp_path / method, method)})").wait() == 0
        expected[method] = contents(tmp_path / method)
    for _ in range(2):
        forks.log.write_text("")
        started = {method: forks.start(f"main({command(folders, out, method, *flags)})") for method in METHODS}
        codes = {method: process.wait() for method, process in started.items()}
        assert sorted(codes.values()) == [0, 8, 8, 8], forks.log.read_text("utf-8")
        [winner] = [method for method, code in codes.items() if code == 0]
        assert contents(out) == expected[winner]
        assert list(out.parent.iterdir()) == [out]
        lines = [line for line in forks.log.read_text("utf-8").splitlines() if "warning: " not in line]
        assert len(lines) == 3, lines
        assert all(line.startswith("symfuse: ") and REFUSALS.search(line) for line in lines)
        shutil.rmtree(out.parent)


# ---- one file


def test_threads_that_write_one_page(tmp_path: Path) -> None:
    """Readers meet a whole one at any time."""
    page, pages, seen, done = tmp_path / "page.html", [f"{n}" * 300_000 for n in range(3)], set(), threading.Event()

    def read() -> None:
        while not done.is_set():
            if page.exists():
                seen.add(page.read_text("utf-8"))
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(20):
            results = at_once({n: partial(write_text, page, text, "the page") for n, text in enumerate(pages)})
            assert set(results.values()) == {None}
    finally:
        done.set()
        reader.join()
    assert seen <= set(pages)
    assert list(tmp_path.iterdir()) == [page]


def test_a_wrong_kind_of_error_is_no_clear_one() -> None:
    for wrong in (SymfuseError("another run is writing this output: it holds the lock of x"), OSError("File exists")):
        with pytest.raises(AssertionError):
            the_winner({0: None, 1: wrong})
