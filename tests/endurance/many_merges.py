"""Many merges in this process, and what of it grows: python many_merges.py FOLDER WARM RUNS MORE

From the first WARM merges to RUNS; then, for MORE that leak on purpose: a JSON list of each. A process of its own, in
which nothing else comes and goes, and whose calls are not type-checked.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import symfuse

# Of each method the parameters that it must be given, and how many models it takes.
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "linear": ({}, 3),
    "ties": ({"base": 0, "parameters": {"density": 0.5}}, 3),
    "dare_ties": ({"base": 0, "parameters": {"density": 0.5}}, 3),
    "slerp": ({"base": 0, "parameters": {"t": 0.3}}, 2),
    "breadcrumbs": ({"base": 0, "parameters": {"density": 0.5}}, 3),
    "della": ({"base": 0, "parameters": {"density": 0.5}}, 3),
    "karcher": ({}, 3),
    "model_stock": ({"base": 0}, 3),
    "nuslerp": ({"weights": [0.3, 0.7]}, 2),
    "sce": ({"base": 0}, 3),
    "iso_c": ({"base": 0}, 3),
    "arcee_fusion": ({"base": 0}, 2),
    "passthrough": ({}, 1),
}


@dataclass(frozen=True)
class Held:
    """What this process holds: bytes of tensors, and those that Python was asked for since the beginning and not given
    back; open files, threads, and objects of Python that have references."""

    memory: int
    files: int
    threads: int
    objects: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        objects = gc.get_objects()
        storages = [one.untyped_storage() for one in objects if issubclass(type(one), torch.Tensor)]
        memory = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        files = len(os.listdir("/proc/self/fd" if Path("/proc/self").is_dir() else "/dev/fd"))  # noqa: PTH208
        return cls(memory + tracemalloc.get_traced_memory()[0], files, threading.active_count(), len(objects))


def grown(work: Callable[[int], None], numbers: range) -> list[str]:
    """What grows while `work(n)` is done for those numbers.

    Files and threads may not grow at all, objects by less than one a run, memory by 5 kB a run and 200 kB, by which
    what is kept from one run to the next differs.
    """
    before = Held.now()
    for n in numbers:
        work(n)
    after = Held.now()
    allowed = {"memory": 200_000 + 5_000 * len(numbers), "files": 0, "threads": 0, "objects": len(numbers)}
    more = {key: value - asdict(before)[key] for key, value in asdict(after).items()}
    return [f"{key}: {more[key]} more" for key, most in allowed.items() if more[key] > most]


class Merges:
    """A merge of models opened anew, by the methods in turn; every tenth of an aligned one; some resumed, and some that
    fail half-way first. The last before each number in `plain` is a linear one, so that like is compared with like."""

    def __init__(self, folder: Path, plain: tuple[int, ...]) -> None:
        self.folder = folder
        self.plain = plain

    def __call__(self, n: int) -> None:
        method = "linear" if n + 1 in self.plain else list(METHODS)[n % len(METHODS)]
        options, count = METHODS[method]
        given = [symfuse.open(self.folder / model) for model in "abc"[:count]]
        if n % 10 == 0 and count > 1:
            given[1] = symfuse.match(given[1], to=given[0], axes=("attention", "ffn"))(given[1])
        merged = symfuse.merge(given, method=method, **options)
        if n % 7 == 0:
            with suppress(KeyError):
                merged.save(self.folder / "failed", progress=fails, resume=n % 2 == 0, fingerprint="same")
                raise AssertionError("it should have failed")
        merged.save(self.folder / "out", overwrite=True, resume=n % 2 == 0, fingerprint=str(n))


def fails(_name: str, _nbytes: int) -> None:
    raise KeyError("half-way")


class Leaks:
    """Such merges, each of which leaves a file open, 200 kB, a thread and two objects."""

    def __init__(self, merges: Merges) -> None:
        self.merges = merges
        self.kept: list[object] = []

    def __call__(self, n: int) -> None:
        self.merges(n)
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        self.kept += [Path(os.devnull).open("rb"), os.urandom(200_000), thread, [[]]]  # noqa: SIM115


if __name__ == "__main__":
    warm, runs, more = map(int, sys.argv[2:])
    merges = Merges(Path(sys.argv[1]), (warm, runs, runs + more))
    for n in range(warm):
        merges(n)
    tracemalloc.start()
    print(json.dumps([grown(merges, range(warm, runs)), grown(Leaks(merges), range(runs, runs + more))]))
