"""Time of `assign` against scipy's solver, on scores like those of feed-forward layers of real size.

    python benchmarks/assignment.py [--quick]

The two take turns on the same matrices; a ratio is the median over the turns, so a busy machine bends both.
The Gram product that makes the scores is the floor: what matching costs before any assignment.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from symfuse.groups.assignment import assign


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def features(kind: str, n: int) -> tuple[Tensor, Tensor]:
    """The units of two gated layers of width n / 4, a row each: their weights towards the residual stream."""
    generator = torch.Generator().manual_seed(n)
    width, rank = n // 2 + 1, n // 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "independent":
        return normal(n, width), normal(n, width)
    if kind == "correlated":  # directions in common with a falling spectrum, units of unequal norm
        directions = normal(rank, width) * torch.arange(1, rank + 1).rsqrt()[:, None]
        x, y = ((normal(n, rank) @ directions + 0.3 * normal(n, width)) * (0.5 * normal(n, 1)).exp() for _ in "xy")
        return x, y
    x = normal(n, width)
    return x, x[torch.randperm(n, generator=generator)] + 0.3 * normal(n, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under 15 seconds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, scipy {scipy.__version__}, numpy {np.__version__}", end=", ")
    print(f"Python {platform.python_version()}, {platform.machine()}, 1 thread, float32 scores; medians")
    print(f"{'scores':12} {'n':>5} {'Gram':>8} {'scipy':>8} {'assign':>8} {'scipy/assign':>13} {'gap':>8}")
    linear_sum_assignment(np.eye(2))
    for n in (512, 1024) if quick else (768, 3072, 4096):
        for kind in ("independent", "correlated", "fine-tune"):
            x, y = features(kind, n)
            scores = x @ y.T
            matrix = scores.numpy()
            turns = [
                (
                    timed(lambda x=x, y=y: x @ y.T),
                    timed(lambda m=matrix: linear_sum_assignment(m, maximize=True)[1]),
                    timed(lambda s=scores: assign(s).numpy()),
                )
                for _ in range(3)
            ]
            gram, peer, ours = (statistics.median(turn[k][0] for turn in turns) for k in range(3))
            ratio = statistics.median(turn[1][0] / turn[2][0] for turn in turns)
            best, found = (matrix[np.arange(n), turns[0][k][1]].sum(dtype=np.float64) for k in (1, 2))
            gap = abs(best - found) / abs(best)
            print(
                f"{kind:12} {n:5} {gram:7.3f}s {peer:7.3f}s {ours:7.3f}s {ratio:12.1f}x {gap:8.0e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
