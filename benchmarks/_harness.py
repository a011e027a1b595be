"""One way to time things, for all benchmarks, on a machine that is never quite quiet.

Every round runs all rows of a case once, in a new order, so that a slow spell falls on all alike. Seconds are medians
over the rounds, ± is half the interquartile range, and a ratio is the median of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import random
import reprlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
BIN = Path(sys.executable).parent
SLOW, SLOW_PEER = 10.0, 5.0  # seconds; what takes longer is run once
LONG = 25.0  # seconds; a case that took so long has no further round
ENOUGH, MOST = 3.0, 30  # quick cases have more rounds: until they took so many seconds, or so many rounds
PACKAGES = ("symfuse", "torch", "numpy", "scipy", "numba", "transformers", "safetensors", "mergekit")

NARROW = (128, 256, 512)  # widths where whole modules are run, again and again

By = Literal["wall", "cpu", "peak"]
Sizes = Mapping[str, float]


@dataclass(frozen=True)
class Took:
    """Seconds by the clock and of the processor (all threads), and bytes at the peak: all that a process of its own had
    resident; of a call in this process what it took beside all that lay ready, None where nobody can say."""

    wall: float
    cpu: float
    peak: int | None = None

    def __add__(self, other: Took) -> Took:
        """One after the other."""
        peaks = [one.peak for one in (self, other) if one.peak is not None]
        return Took(self.wall + other.wall, self.cpu + other.cpu, max(peaks, default=None))


# What a row runs. One that returns a Took has measured itself, such as a process; else the call is timed.
Call = Callable[[], object]
Runs = dict[str, list[Took]]


@dataclass(frozen=True)
class Case:
    """Something that a benchmark measures. sizes: what may grow, such as width and layers. setting: all else that tells
    it apart. rows: makes, for a number of threads, what is timed, by name; what that takes is not timed."""

    sizes: Sizes
    setting: Mapping[str, str]
    rows: Callable[[int], Mapping[str, Call]]


@dataclass(frozen=True)
class Goal:
    """`row` takes at most `bound` × `base` (least: at least), in every case that agrees with `where`."""

    row: str
    base: str
    bound: float
    by: By = "cpu"
    least: bool = False
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """quick: sizes at which everything takes a moment. work: a folder for models, which are left there."""

    quick: bool
    work: Path

    def cross(
        self, widths: Sequence[int] = (384, 768, 1024), layers: Sequence[int] = (3, 6, 12)
    ) -> list[dict[str, int]]:
        """Every width at the least depth, and every depth at the middle width."""
        if self.quick:
            widths, layers = (64, 128, 192), (1, 2, 3)
        cells = [(width, layers[0]) for width in widths] + [(widths[1], depth) for depth in layers[1:]]
        return [{"width": width, "layers": depth} for width, depth in cells]


@dataclass(frozen=True)
class Benchmark:
    """ours: the row that is compared; floor: the row that it cannot be without; peers: rows of others. warm: whether
    the first run is not counted (a process of its own starts afresh each time). threaded: else all is on one thread."""

    title: str
    about: str
    cases: Callable[[Plan], Iterator[Case]]
    ours: str
    floor: str | None = None
    peers: tuple[str, ...] = ()
    goals: tuple[Goal, ...] = ()
    warm: bool = True
    threaded: bool = True


# -- timing ----------------------------------------------------------------------------------------


def timed(call: Call, *, memory: bool = False) -> Took:
    """memory: measure the peak too (Linux), which takes a moment."""
    gc.collect()
    before = _resident() if memory else None
    cpu, wall = time.process_time(), time.perf_counter()
    found = call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if isinstance(found, Took):
        return found
    return Took(wall, cpu, None if before is None else max(0, _memory("VmHWM") - before))


def _memory(what: str) -> int:
    """Bytes that this process has, VmRSS, or had at the peak, VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


def _resident() -> int | None:
    """Bytes that this process has, from which on its peak is counted anew."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is no longer there
        Path("/proc/self/clear_refs").write_text("5")
        return _memory("VmRSS")
    except (OSError, AttributeError):  # not Linux
        return None


def process(command: Sequence[str | Path], *, threads: int | None = None) -> Took:
    """Run a command to the end; RuntimeError with what it said last if it fails. threads: of its BLAS."""
    env = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    env.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder) / "result", Path(folder) / "log"
        with said.open("wb") as log:
            child = [sys.executable, "-S", HERE / "_child.py", result, *command]
            subprocess.run([str(part) for part in child], env=env, stdout=log, stderr=log, check=True)
        found = json.loads(result.read_text())
        if found["code"]:
            raise RuntimeError(f"{command} ended with {found['code']}:\n{said.read_text()[-2000:]}")
    return Took(found["wall"], found["cpu"], found["peak"])


def interleave(
    rows: Mapping[str, Call], rounds: int, *, peers: Sequence[str] = (), warm: bool = True, enough: float = ENOUGH
) -> Runs:
    """Every row once in each round. The first run warms up and is not counted, except of rows that are too slow to be
    run again. Long cases have fewer rounds, short ones more."""
    first = {name: timed(call, memory=True) for name, call in rows.items()}
    again = [name for name, took in first.items() if took.wall <= (SLOW_PEER if name in peers else SLOW)]
    runs = {name: [] if warm and name in again else [took] for name, took in first.items()}
    order, number = random.Random(0), 0 if warm else 1
    spent = 0.0 if warm else sum(took.wall for took in first.values())
    while again and (number == 0 or (number < rounds and spent < LONG) or (number < MOST and spent < enough)):
        for name in order.sample(again, len(again)):
            took = timed(rows[name])
            runs[name].append(took if took.peak is not None else Took(took.wall, took.cpu, first[name].peak))
            spent += took.wall
        number += 1
    return runs


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """That many workers with one BLAS thread each, as matching uses them."""
    with torch_threads(1), ThreadPoolExecutor(workers) as pool:
        yield pool


# -- results as data -------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half the interquartile range, as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / median(values)


def ratio(one: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of one / base; of what was run once over the median of the other."""
    if len(one) == len(base):
        return median([a / b for a, b in zip(one, base, strict=True)])
    return median(one) / median(base)


def measure(
    benchmark: Benchmark, case: Case, threads: int, rounds: int, *, enough: float = ENOUGH, without: Sequence[str] = ()
) -> dict[str, Any]:
    """One case, as data. without: rows that are not run."""
    with torch_threads(threads):
        rows = {name: call for name, call in case.rows(threads).items() if name not in without}
        runs = interleave(rows, rounds, peers=benchmark.peers, warm=benchmark.warm, enough=enough)
    each = {
        name: {by: [_short(getattr(took, by)) for took in found] for by in ("wall", "cpu")}
        for name, found in runs.items()
    }
    out = []
    for name, found in runs.items():
        peaks = [took.peak for took in found if took.peak is not None]
        row: dict[str, Any] = {"row": name, "peak": max(peaks, default=None)}
        row |= {by: median(each[name][by]) for by in ("wall", "cpu")} | {"spread": _short(spread(each[name]["wall"]))}
        for base in (benchmark.floor, benchmark.ours):
            if base in each and base != name:
                row[f"over {base}"] = {by: _short(ratio(each[name][by], each[base][by])) for by in ("wall", "cpu")}
        out.append(row | {"rounds": each[name]})
    return {
        "sizes": dict(case.sizes), "setting": dict(case.setting), "threads": threads,
        "load": _short(os.getloadavg()[0]), "rows": out,
    }  # fmt: skip


def _short(value: float) -> float:
    """Four digits, which is more than any timing has."""
    return float(f"{value:.4g}")


def environment() -> dict[str, Any]:
    """What the figures are of: machine, load, versions, commit ("-dirty" if files were changed since)."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "absent"

    git = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "commit": found or "unknown",
        "cores": os.cpu_count(),
        "processor": names[0].partition(": ")[2] if names else platform.machine(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: of(name) for name in PACKAGES},
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


# -- what a command is given, before anything is measured ------------------------------------------

Unfit = argparse.ArgumentTypeError  # says what was expected and what was found; argparse says of which option


@contextmanager
def option(parser: argparse.ArgumentParser, name: str) -> Iterator[None]:
    """What is Unfit herein is told as argparse tells it of an option's type: of what is known only after parsing."""
    try:
        yield
    except Unfit as error:
        parser.error(f"argument {name}: {error}")


def positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise Unfit(f"expected a whole number from 1 on, found {text!r}")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(positive, text.split(",")))
    except Unfit:
        raise Unfit(f"expected whole numbers from 1 on, such as 1,2, found {text!r}") from None


def writable_folder(path: Path) -> Path:
    """It is made if there is none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise Unfit(f"expected a folder to write to, found {str(path)!r} ({error.strerror})") from None


def writable_file(path: Path) -> Path:
    """In a folder that is made if there is none; the file itself is left as it is, or not there."""
    new = not os.path.lexists(path)
    if new:
        writable_folder(path.parent)
    try:
        with path.open("ab"):
            if new:
                path.unlink()
            return path
    except OSError as error:
        raise Unfit(f"expected a file to write to, found {str(path)!r} ({error.strerror})") from None


@dataclass(frozen=True)
class Kind:
    """Of a value in JSON."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Maybe:
    """What is wanted, or null, or an object that is empty."""

    wanted: Any


TEXT = Kind("text", lambda x: isinstance(x, str))
COUNT = Kind("a whole number", lambda x: type(x) is int and x >= 0)
NUMBER = Kind("a number from 0 on", lambda x: type(x) in (int, float) and 0 <= x < sys.float_info.max)
ABOVE = Kind("a number above 0", lambda x: NUMBER.holds(x) and x > 0)
_LIST = Kind("a list that is not empty", lambda x: isinstance(x, list) and len(x) > 0)
_OBJECT = Kind("an object", lambda x: isinstance(x, dict))


def read_json(place: str | Path, wanted: Any) -> Any:
    """What a file says; Unfit if it is not there, is not JSON, or lacks something of what is wanted: a Kind; a Maybe;
    [one], a list of such, which is not empty; {name: one}, an object that has these names at least, {str: one}, any."""
    at = repr(str(place))
    try:
        found = json.loads(Path(place).read_text("utf-8"))
    except OSError as error:
        raise Unfit(f"{at}: expected a file of JSON, found none that can be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise Unfit(f"{at}: expected JSON, found something else ({error})") from None
    _expect(found, wanted, at)
    return found


def _expect(found: Any, wanted: Any, at: str) -> None:
    if isinstance(wanted, Maybe):
        if found in (None, {}):
            return
        wanted = wanted.wanted
    kind = wanted if isinstance(wanted, Kind) else _LIST if isinstance(wanted, list) else _OBJECT
    if not kind.holds(found):
        raise Unfit(f"{at}: expected {kind.words}, found {reprlib.repr(found)}")
    if isinstance(wanted, list):
        for number, inner in enumerate(found):
            _expect(inner, wanted[0], f"{at}: {number}")
    elif isinstance(wanted, dict):
        for name, inner in dict.fromkeys(found, wanted[str]).items() if str in wanted else wanted.items():
            if name not in found:
                raise Unfit(f"{at}: expected an object with {name!r}, found {reprlib.repr(found)}")
            _expect(found[name], inner, f"{at}: {name}")
