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

import torch

Task = Callable[[], object]
Times = dict[str, list[float]]


def interleave(tasks: Mapping[str, Task], rounds: int) -> Times:
    """Seconds of each task in each round, after one warm-up of each."""
    times: Times = {name: [] for name in tasks}
    order = random.Random(0)
    for task in tasks.values():
        task()
    for _ in range(rounds):
        for name in order.sample(list(tasks), len(tasks)):
            gc.collect()
            start = time.perf_counter()
            tasks[name]()
            times[name].append(time.perf_counter() - start)
    return times


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> float:
    """Half the interquartile range, as a share of the median."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / median(values)


def ratio(times: Times, name: str, base: str) -> float:
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
