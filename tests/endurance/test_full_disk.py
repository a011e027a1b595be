"""A disk that fills up, or fails, at any of the calls by which an output comes about: nothing half-written stays, what
was there before is kept, and what is resumed is bit-identical."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contract.tiny import MODELS
from endurance.long_runs import Event, before_each_call, broken, contents, full, models, nothing, save_small, small
from symfuse import adapters, declare
from symfuse.alignment import random_alignment
from symfuse.errors import OutputError, SymfuseError
from symfuse.evaluation import Score, landscape
from symfuse.executors import Threads
from symfuse.io import Checkpoint, weights, write
from symfuse.io.direct import DirectFile
from symfuse.io.target import write_text
from symfuse.io.weights import SCRATCH, WriteShard
from symfuse.spec import Spec
from symfuse.stats.statistics import Statistics

FAILURES = [full, broken]
Failure = Callable[[int], Event]
Writer = Callable[[Path, int], object]  # writes to a place; what, depends on a number


@pytest.fixture(autouse=True)
def every_tensor_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody waits for the disk: no power fails here."""
    monkeypatch.setattr(weights, "BATCH", 1)
    monkeypatch.setattr(os, "fsync", lambda _file: None)


def model(target: Path, seed: int) -> None:
    save_small(target, seed, overwrite=True)


def resumed(target: Path, seed: int) -> None:
    save_small(target, seed, overwrite=True, resume=True, fingerprint=str(seed))


class Elsewhere(Threads):
    """Weight files are made whole, as in other processes, and by threads all the same."""

    elsewhere = True


def whole_files(target: Path, seed: int) -> None:
    save_small(target, seed, overwrite=True, executor=Elsewhere(1))


def resumed_whole_files(target: Path, seed: int) -> None:
    save_small(target, seed, overwrite=True, executor=Elsewhere(1), resume=True, fingerprint=str(seed))


def adapter(target: Path, seed: int) -> None:
    one, two = (Checkpoint({"up.weight": torch.eye(9)[:7] * n}, {}, name="m") for n in (seed, seed + 3))
    adapters.extract_lora(one, two, 2).save(target)


def statistics(target: Path, seed: int) -> None:
    tensors = {f"w{n}": torch.rand(9, 7, generator=torch.Generator().manual_seed(n)) for n in range(3)}
    Statistics("fisher", tensors, seed).save(target, {"README.md": "x"})


def text(target: Path, seed: int) -> None:
    write_text(target, f"page {seed}\n" * 2000, "the page")


@cache
def tiny() -> Spec:
    return declare(MODELS["bert-mlm"](0))


def alignment(target: Path, seed: int) -> None:
    random_alignment(tiny(), seed).save(target)


def bytes_of(place: Path) -> object:
    return place.read_bytes() if place.is_file() else contents(place) if place.is_dir() else None


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("writer", [model, whole_files, adapter, statistics, text, alignment])
def test_nothing_half_written_stays(tmp_path: Path, writer: Writer, failure: Failure) -> None:
    (tmp_path / "mine").write_text("mine")
    place = tmp_path / ("out" if writer in (text, alignment) else "new/out")
    with before_each_call(nothing) as calls:
        writer(place, 1)
    expected = bytes_of(place)
    failed = 0
    for number, name in enumerate(calls):
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        (tmp_path / "out").unlink(missing_ok=True)
        said = ""
        try:
            with before_each_call(failure(number)):
                writer(place, 1)
        except OutputError as error:
            said = str(error)
        if said:
            failed += 1
            assert str(place) in said
            assert [path.name for path in tmp_path.iterdir()] == ["mine"], f"{name}, call {number}"
        else:
            assert bytes_of(place) == expected, f"{name}, call {number}"
            assert [path.name for path in place.parent.iterdir() if path.name != "mine"] == ["out"]
    assert failed > len(calls) / 2, "of most of them the writer should hear"


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("writer", [model, resumed, whole_files, resumed_whole_files, adapter, statistics])
def test_no_file_stays_open(tmp_path: Path, writer: Writer, failure: Failure) -> None:
    """The process may go on, for long, and on a disk that is full."""
    with before_each_call(nothing) as calls:
        writer(tmp_path / "out", 1)
    before = opened()
    for number, name in enumerate(calls):
        with suppress(OutputError), before_each_call(failure(number)):
            writer(tmp_path / str(number), 1)
        assert opened() == before, f"{name}, call {number}"


def test_of_a_weight_file_nothing_stays_where_it_was_begun(tmp_path: Path) -> None:
    whole = small(1)
    infos = {name: whole.info(name) for name in whole}
    (tmp_path / SCRATCH).mkdir()
    work = WriteShard(tmp_path / "out", tmp_path, {"x": infos}, lambda name: [whole[name]], True)
    with before_each_call(nothing) as calls:
        work("x", threading.Event())
    assert len(calls) > 5
    (tmp_path / "x").unlink()
    for number, name in enumerate(calls):
        with pytest.raises(OutputError), before_each_call(broken(number)):
            work("x", threading.Event())
        assert list(tmp_path.rglob("*")) == [tmp_path / SCRATCH], f"{name}, call {number}"


def test_a_file_that_is_closed_twice_closes_no_other(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "x")
    file.close()
    others = [os.open(tmp_path / "x", os.O_RDONLY) for _ in range(2)]  # under the numbers that are free now
    file.close()
    assert [os.fstat(other).st_size for other in others] == [0, 0]
    for other in others:
        os.close(other)


def opened() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("writer", "failure"),
    [
        (text, full), (text, broken), (alignment, full), (alignment, broken), (model, full), (resumed, broken),
        (whole_files, broken), (resumed_whole_files, full),
        pytest.param(model, broken, marks=pytest.mark.slow), pytest.param(resumed, full, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_was_there_is_kept(tmp_path: Path, writer: Writer, failure: Failure) -> None:
    """Until what replaces it has its name; and of what is resumed afterwards every byte is right."""
    place = tmp_path / "out"
    versions = []
    for seed in (2, 1):
        with before_each_call(nothing) as calls:
            writer(place, seed)
        versions.append(bytes_of(place))
    new, old = versions
    for number, name in enumerate(calls):
        said = ""
        try:
            with before_each_call(failure(number)):
                writer(place, 2)
        except OutputError as error:
            said = str(error)
        if said:
            assert bytes_of(place) == old, f"{name}, call {number}"
            left = [path for path in tmp_path.iterdir() if path != place]
            assert len(left) <= (writer in (resumed, resumed_whole_files))
            assert all(f"are kept in {path}: run again with resume" in said for path in left)
            writer(place, 2)
        assert bytes_of(place) == new, f"{name}, call {number}"
        assert list(tmp_path.iterdir()) == [place], f"{name}, call {number}"
        writer(place, 1)


@pytest.mark.parametrize("failure", [pytest.param(full, marks=pytest.mark.slow), broken])
def test_a_run_that_goes_on_loses_nothing_either(tmp_path: Path, failure: Failure) -> None:
    """Whichever call fails in it: what the run before has finished is not asked for again."""
    whole, asked = small(1), []  # type: Checkpoint, list[str]
    infos = {name: whole.info(name) for name in whole}

    def run(place: Path, stop: str = "") -> None:
        asked.clear()

        def blocks(name: str) -> Iterator[Tensor]:
            if name == stop:
                raise KeyError(stop)
            asked.append(name)
            yield whole[name]

        write(place, infos, blocks, config={}, companions={"a.txt": b"a"}, threads=1, resume=True, fingerprint="f")

    with before_each_call(nothing) as calls:
        run(tmp_path / "expected")
    for number in range(len(calls)):
        place = tmp_path / str(number)
        with pytest.raises(KeyError):
            run(place, stop="w2")
        try:
            with before_each_call(failure(number)) as second:
                run(place)
        except OutputError:
            renamed = "rename" in second or "rename" in calls[number - 1 :]  # then there is no journal any more
            run(place)
            assert renamed or {"w0", "w1"}.isdisjoint(asked), f"call {number} of {second}"
        assert bytes_of(place) == bytes_of(tmp_path / "expected"), f"call {number}"
    assert not list(tmp_path.glob(".*"))


class Number(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor([value, value**2]))


@pytest.mark.parametrize("failure", FAILURES)
def test_a_landscape_keeps_its_points(tmp_path: Path, failure: Failure) -> None:
    measured: list[int] = []

    def loss(module: torch.nn.Module) -> Score:
        measured.append(1)
        return Score(float(module.value.square().sum()))  # type: ignore[union-attr, operator]

    def run(file: Path) -> object:
        measured.clear()
        return landscape({name: Number(float(n)) for n, name in enumerate("abc")}, loss, steps=3, journal=file).scores

    with before_each_call(nothing) as calls:
        run(tmp_path / "expected")
    points = len(measured)
    for number in range(len(calls)):
        file = tmp_path / f"{number}.jsonl"
        shutil.copy(tmp_path / "expected", file)
        file.write_text("\n".join(file.read_text().splitlines()[:5]) + "\n")  # four points are done
        try:
            with before_each_call(failure(number)):
                run(file)
        except (SymfuseError, OSError):
            run(file)
        assert len(measured) <= points - 4, f"call {number}"
        assert file.read_bytes() == (tmp_path / "expected").read_bytes()


LIMITED = """
import resource, signal, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from symfuse.cli import main
main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1000, 200_000])
def test_the_system_allows_no_larger_file(tmp_path: Path, size: int) -> None:
    """Not imitated: less than the card, less than the weights."""
    folders = models(tmp_path / "models")
    options = ["merge", *map(str, folders), "-o", str(tmp_path / "new" / "out"), "-q"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(size), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 8, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "warning: " not in line]
    assert "could not be written: [Errno 27] File too large" in line
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
