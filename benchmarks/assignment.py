"""The solver of assignments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from _harness import Benchmark, Call, Case, Goal, Plan
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from symfuse.groups.assignment import assign

PRODUCT, OURS, PEER = "Gram product", "assign", "scipy"
INDEPENDENT = {"scores": "independent"}


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


def rows(kind: str, n: int, threads: int) -> dict[str, Call]:  # noqa: ARG001 - one
    x, y = features(kind, n)
    scores = x @ y.T
    matrix = scores.numpy()
    return {
        PRODUCT: lambda: x @ y.T,
        OURS: lambda: assign(scores),
        PEER: lambda: linear_sum_assignment(matrix, maximize=True),
    }


def cases(plan: Plan) -> Iterator[Case]:
    sizes = (128, 256, 512) if plan.quick else (768, 3072, 8192)
    for n in sizes:
        yield Case({"n": n}, INDEPENDENT, partial(rows, "independent", n))
    for kind in ("correlated", "fine-tune"):
        yield Case({"n": sizes[1]}, {"scores": kind}, partial(rows, kind, sizes[1]))


BENCHMARK = Benchmark(
    title="Assignment",
    about="""`symfuse.groups.assignment.assign` compared with scipy's solver, on float32 scores like those of
feed-forward layers, one thread. The floor is the Gram product that makes the scores (n × n/2 × n): the cost of
matching before any assignment. Compilation is not included.""",
    cases=cases,
    ours=OURS,
    floor=PRODUCT,
    peers=(PEER,),
    goals=(
        Goal(PEER, OURS, 8, least=True, where={"n": 3072} | INDEPENDENT),
        Goal(PEER, OURS, 20, least=True, where={"n": 8192} | INDEPENDENT),
    ),
    threaded=False,
)
