"""Matching of feed-forward neurons."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial

from _harness import ROOT, Benchmark, Call, Case, Goal, Plan, one_thread_each
from _models import for_naive, pair, roberta
from torch import Tensor

from symfuse.groups.assignment import assign
from symfuse.matching import match_models
from symfuse.model import Model

sys.path.append(str(ROOT / "tests" / "reference"))
import naive

FLOOR, PRODUCTS, OURS = "products and assignments", "… products alone", "permutation"
PEER = "as published: scipy"


def floor(source: Model, anchor: Model, threads: int, *, solve: bool = True) -> Call:
    """The Gram products in float32 and the exact assignments; without `solve` the products alone."""
    states = [for_naive(model) for model in (anchor, source)]
    jobs = []
    for layer in range(source.spec.axes["l"].size):
        into, out = naive.FFN_IN.format(layer), naive.FFN_OUT.format(layer) + "weight"
        jobs.append([(naive.with_bias(s, into), s[out].T.contiguous()) for s in states])

    def one(job: list[tuple[Tensor, Tensor]]) -> None:
        (x, x2), (y, y2) = job
        gram = (x @ y.T).addmm_(x2, y2.T)
        if solve:
            assign(gram)

    def run() -> None:
        with one_thread_each(threads) as pool:
            list(pool.map(one, jobs))

    return run


def rows(sizes: Mapping[str, int], kind: str, peer: bool, threads: int) -> dict[str, Call]:
    source, anchor = pair(roberta(**sizes), kind)

    def published() -> None:
        states = for_naive(source), for_naive(anchor)
        for layer in range(sizes["layers"]):
            naive.match_ffn(*states, layer)

    found: dict[str, Call] = {
        FLOOR: floor(source, anchor, threads),
        PRODUCTS: floor(source, anchor, threads, solve=False),
        OURS: lambda: match_models(source, anchor, axes="ffn", biases=False, threads=threads),
    }
    return found | ({PEER: published} if peer else {})


def cases(plan: Plan) -> Iterator[Case]:
    cross = plan.cross()
    for kind in ("independent", "fine-tune"):
        for sizes in cross if kind == "independent" else cross[1:2]:
            peer = sizes["layers"] == cross[0]["layers"]  # a layer takes it seconds
            yield Case(sizes, {"pair": kind}, partial(rows, sizes, kind, peer))


BENCHMARK = Benchmark(
    title="Feed-forward matching",
    about="""Permutations of the 4 × width neurons of each layer of a RoBERTa, from tensors in memory. The floor is
the Gram products in float32, from prepared slices, and the exact assignment of each by our solver, with as many
workers ([assignment](#assignment) compares the solver with scipy's). As published: scipy's solver, cold, and the
dense 0/1 matrix.""",
    cases=cases,
    ours=OURS,
    floor=FLOOR,
    peers=(PEER,),
    goals=(Goal(OURS, FLOOR, 1.3),),
)
