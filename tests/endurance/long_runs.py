"""What long runs are tried on: real models of a few MB, the calls by which an output comes about, and processes that
are forked when symfuse is imported already, so that each costs no start."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from recipes.llama import llama
from symfuse.io import Checkpoint, weights

SIZES: dict[str, Any] = {
    "rows": 1000, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "dtype": torch.bfloat16,
}  # fmt: skip


def models(root: Path, layers: int = 3, **sizes: Any) -> list[Path]:
    """Three Llamas of 1.6 MB."""
    return [llama(root / name, seed, layers=layers, **{**SIZES, **sizes}) for seed, name in enumerate("abc")]


def small(seed: int) -> Checkpoint:
    """Of a few tensors, with a tokenizer's file in a folder."""
    rng = torch.Generator().manual_seed(seed)
    weights = {f"w{n}": torch.randn(150, 211, generator=rng).bfloat16() for n in range(4)}
    return Checkpoint(weights, {"seed": seed}, name="small", files={"1_Words/list.json": b"a b c"})


def save_small(target: Path, seed: int, **options: Any) -> None:
    """In two shards, with another file."""
    options = {"max_shard_size": 140_000, "extra": {"symfuse.json": "x"}, "threads": 1, **options}
    small(seed).save(target, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- calls of the system


Event = Callable[[int, str], None]  # the number of a call, from 0, and its name; it raises what the call shall raise

TAKING = frozenset({"create", "fsync", "ftruncate", "mkdir", "posix_fallocate", "pwrite", "write"})  # of space
CALLS = TAKING - {"create"} | {"rename", "replace"}


@contextmanager
def before_each_call(event: Event) -> Iterator[list[str]]:
    """`event` runs before every call by which something is written, not before those that remove; gives their names."""
    seen: list[str] = []

    def happens(name: str) -> None:
        seen.append(name)
        event(len(seen) - 1, name)

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            happens(name)
            return real(*args, **options)

        return call

    class File(io.FileIO):
        """What Path.open gives to a writer: buffered writes do not go through os.write."""

        def write(self, data: Any) -> int:
            happens("write")
            return super().write(data)

    def low(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            happens("create")
        return system_open(path, flags, *args, **options)

    def high(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wxa"):
            return file_open(file, mode, *args, **options)
        happens("create")
        raw = io.BufferedWriter(File(file, mode.replace("b", "").replace("t", "")))
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

    real = {name: getattr(os, name) for name in CALLS if hasattr(os, name)}
    system_open, file_open = os.open, io.open
    try:
        for name, function in real.items():
            setattr(os, name, watched(name, function))
        os.open, io.open = low, high  # type: ignore[assignment]
        yield seen
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        os.open, io.open = system_open, file_open  # type: ignore[assignment]


def nothing(_number: int, _name: str) -> None:
    """All calls succeed."""


def full(at: int) -> Event:
    """From that call on there is no space."""

    def event(number: int, name: str) -> None:
        if number >= at and name in TAKING:
            raise OSError(errno.ENOSPC, "No space left on device")

    return event


def broken(at: int) -> Event:
    """That one call fails, whichever it is."""

    def event(number: int, _name: str) -> None:
        if number == at:
            raise OSError(errno.EIO, "Input/output error")

    return event


def killed(at: int) -> Event:
    """The process is gone before that call."""

    def event(number: int, _name: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return event


def save_until(event: Event, target: Path, seed: int, **options: Any) -> list[str]:
    """`save_small` with each tensor noted at once; its calls."""
    batch, weights.BATCH = weights.BATCH, 1
    try:
        with before_each_call(event) as calls:
            save_small(target, seed, **options)
    finally:
        weights.BATCH = batch
    return calls


def stuck(scratch: Path, here: Path) -> None:
    """Some calls after there is a scratch folder this thread says so, and then only a signal ends it."""
    count = found = 0

    def called(*_: object) -> None:
        nonlocal count, found
        count += 1
        if count % 1000 == 0 and any(scratch.iterdir()):
            found += 1
            if found == 3:
                here.touch()
                time.sleep(600)

    sys.setprofile(called)


# ---- processes

# Reads lines of Python and runs each in a process of its own, forked from here, in the background; answers with its
# number, and to "poll N" and "wait N" with its exit code.
FORKS = """
import atexit, os, signal, sys, torch
for number in (signal.SIGHUP, signal.SIGTERM):  # whatever those who started the tests ignore
    signal.signal(number, signal.SIG_DFL)
torch.set_num_threads(1)
import symfuse.api, symfuse.cli.merge, symfuse.recipes.run, symfuse.reports, long_runs
from symfuse.cli import main

def code_of(child, options):
    done, status = os.waitpid(child, options)
    return os.waitstatus_to_exitcode(status) if done else None

print("ready", flush=True)
for line in sys.stdin:
    word, _, number = line.strip().partition(" ")
    if word in ("poll", "wait"):
        print(code_of(int(number), os.WNOHANG if word == "poll" else 0), flush=True)
        continue
    child = os.fork()
    if child == 0:
        code = 1
        try:
            exec(line)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
"""


class Child(Protocol):
    """What a fork and a process of `subprocess` have in common."""

    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


class Fork:
    """A process that `Forks` started. returncode: of one that was killed, the negative number of the signal."""

    def __init__(self, forks: Forks, number: int) -> None:
        self.forks, self.number = forks, number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            answer = self.forks.ask(f"poll {self.number}")
            self.returncode = None if answer == "None" else int(answer)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self.forks.ask(f"wait {self.number}"))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.number, number)


class Forks:
    """A process with symfuse imported, which runs what it is told in forks of itself. log: what these say on stderr."""

    def __init__(self, log: Path) -> None:
        self.log = log
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", FORKS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self._answer()

    def start(self, code: str) -> Fork:
        """A line of Python."""
        return Fork(self, int(self.ask(code)))

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(200)
        self._process.stdout.close()
