"""Matching of attention heads."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from _harness import ROOT, Benchmark, Call, Case, Goal, Plan, one_thread_each, torch_threads
from _models import HEAD, for_naive, pair, roberta
from torch import Tensor

from symfuse.matching import match_models
from symfuse.model import Model

sys.path.append(str(ROOT / "tests" / "reference"))
import naive

FLOOR, ROTATION, ONE_PASS = "products and SVDs", "rotation", "rotation, then scale"
TURNS, DEFAULT, PEER = "rotation and scale in turns", "by default: in turns, and biases", "head by head, as published"


def floor(source: Model, anchor: Model, threads: int) -> Call:
    """The Gram products in float64, from slices that lie ready, and the SVDs of their sums."""
    layers, width = source.spec.axes["l"].size, source.spec.axes["residual"].size
    jobs = []
    for layer in range(layers):
        sides = [_slices(for_naive(model), layer, width // HEAD) for model in (anchor, source)]
        q, k, v, o = zip(*sides, strict=True)
        jobs += [(q, k), (v, o)]

    def solve(job: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        (x, y), (x2, y2) = job
        gram = x @ y.mT
        gram += x2 @ y2.mT
        torch.linalg.svd(gram)

    def run() -> None:
        with one_thread_each(threads) as pool:
            list(pool.map(solve, jobs))

    return run


def _slices(state: Mapping[str, Tensor], layer: int, heads: int) -> Iterator[Tensor]:
    for part in ("query.", "key.", "value."):
        yield naive.with_bias(state, naive.SELF.format(layer) + part).double().unflatten(0, (heads, -1)).contiguous()
    o = state[naive.OUTPUT.format(layer) + "weight"].T.double()
    yield o.unflatten(0, (heads, -1)).contiguous()


def rows(sizes: Mapping[str, int], kind: str, threads: int) -> dict[str, Call]:
    source, anchor = pair(roberta(**sizes), kind)

    def ours(**options: Any) -> Call:
        return lambda: match_models(source, anchor, axes="attention", threads=threads, **options)

    def published() -> None:
        states = for_naive(source), for_naive(anchor)
        with torch_threads(1):  # two slow it down
            for layer in range(sizes["layers"]):
                naive.match_attention(*states, layer, sizes["width"] // HEAD)

    return {
        FLOOR: floor(source, anchor, threads),
        ROTATION: ours(scaling=False, biases=False),
        ONE_PASS: ours(one_pass=True, biases=False),
        TURNS: ours(biases=False),
        DEFAULT: ours(),
        PEER: published,
    }


def cases(plan: Plan) -> Iterator[Case]:
    cross = plan.cross()
    for kind in ("independent", "fine-tune", "unbalanced"):
        for sizes in cross if kind == "independent" else cross[1:2]:
            yield Case(sizes, {"pair": kind}, partial(rows, sizes, kind))


BENCHMARK = Benchmark(
    title="Attention matching",
    about="""Query/key and value maps of all heads of a RoBERTa, from tensors in memory, including reading and
scanning them. *fine-tune*: the anchor with 2 % of noise; *unbalanced*: queries twice and keys half as large. The
floor is the Gram products in float64, from prepared slices, and one batched SVD of each sum, with as many workers. It
leaves out scales, biases and the test whether an element is better than the identity. As published:
`tests/reference/naive.py`, a loop over heads with one SVD and one quartic each, on one thread (two slow it down). A
test requires it to equal one pass.""",
    cases=cases,
    ours=ONE_PASS,
    floor=FLOOR,
    peers=(PEER,),
    goals=(Goal(ROTATION, FLOOR, 1.2), Goal(ONE_PASS, FLOOR, 1.2), Goal(DEFAULT, FLOOR, 1.2)),
)
