"""Interleaved timings on a shared machine: every round runs every task once, in a new order, so that a slow spell of
the machine falls on all alike; reported are medians, and ratios taken round by round."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Task = Callable[[], object]
Rounds = dict[str, list[float]]


@dataclass(frozen=True)
class Times:
    """Seconds of each task in each round: by the clock, and of the processor (all threads)."""

    wall: Rounds
    cpu: Rounds


def interleave(tasks: Mapping[str, Task], rounds: int) -> Times:
    """Every task once per round, after one warm-up of each."""
    times = Times({name: [] for name in tasks}, {name: [] for name in tasks})
    order = random.Random(0)
    for task in tasks.values():
        task()
    for _ in range(rounds):
        for name in order.sample(list(tasks), len(tasks)):
            gc.collect()
            cpu, wall = time.process_time(), time.perf_counter()
            tasks[name]()
            times.wall[name].append(time.perf_counter() - wall)
            times.cpu[name].append(time.process_time() - cpu)
    return times


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> float:
    """Half the interquartile range, as a share of the median."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / median(values)


def ratio(times: Rounds, name: str, base: str) -> float:
    """The median over rounds of time / time of the base."""
    return median([a / b for a, b in zip(times[name], times[base], strict=True)])


@contextmanager
def one_thread_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """That many workers with one BLAS thread each, as matching uses them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)
