"""One sweep of the descent over all axes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from _harness import Benchmark, Call, Case, Goal, Plan, one_thread_each
from _models import gpt2, pair, roberta
from torch import Tensor

from symfuse.groups import nuclear_norms
from symfuse.groups.assignment import assign
from symfuse.matching.descent import Sweeper
from symfuse.matching.problem import Problem, problem_of
from symfuse.matching.workspace import Workspace
from symfuse.model import Model
from symfuse.spec import Instance
from symfuse.stats import features

AXES = "attention,ffn,heads,residual,pooler"
BATCHED = ("qk", "v")
FLOOR, OURS = "products and solves", "sweep"


@dataclass(frozen=True)
class Ready:
    """A pair in its frame, in memory."""

    problem: Problem
    anchor: Mapping[str, Tensor]
    source: Mapping[str, Tensor]

    @classmethod
    def of(cls, source: Model, anchor: Model) -> Ready:
        problem = problem_of(source, anchor, AXES, None, scaling=True, frame=None)
        names = [name for name in problem.spec.tensors if problem.spec.shares(name, problem.anchor.spec)]
        return cls(problem, *({name: m.read(name) for name in names} for m in (problem.anchor, problem.source)))

    def slices(self, instance: Instance, dtype: torch.dtype, names: list[str] | None = None) -> tuple[Tensor, Tensor]:
        """The features [*b, n, k] of an axis, all of them side by side."""
        spec = self.problem.spec
        touched = [name for name in spec.movable[instance] if name in self.source] if names is None else names
        found = [
            views
            for name in touched
            for _, views in features(spec, instance, name, self.anchor[name], self.source[name])
        ]
        x, y = (torch.cat([views[side].to(dtype) for views in found], -1) for side in (0, 1))
        return x, y


def sweep(ready: Ready, threads: int) -> Call:
    """From the unmoved source."""
    spec, groups = ready.problem.spec, ready.problem.groups

    def run() -> None:
        with one_thread_each(threads) as pool:
            sweeper = Sweeper(spec, ready.anchor.__getitem__, list(groups), groups, pool, ())
            sweeper.sweep(Workspace(spec, dict(ready.source)), random.Random(0))

    return run


def floor(ready: Ready, threads: int) -> Call:
    """The Gram products, from slices that lie ready in the groups' dtypes, and the solves: for a permutation the
    assignment, for rotations one SVD, for the order of heads nuclear norms of all pairs and the assignment."""
    groups = ready.problem.groups
    shared = [_shared(ready, instance) for instance in groups if not instance.index]
    layers: dict[int, list[Callable[[], object]]] = {}
    for instance in groups:
        if instance.index:
            layers.setdefault(instance.index[0], []).append(_inside(ready, instance))

    def one(solves: list[Callable[[], object]]) -> None:
        for solve in solves:
            solve()

    def run() -> None:
        with one_thread_each(threads) as pool:
            for solve in shared:
                solve(pool)
            list(pool.map(one, layers.values()))

    return run


def _shared(ready: Ready, instance: Instance) -> Callable[[Executor], object]:
    """An axis that all layers share: the products of each layer in a worker, one solve."""
    spec, group = ready.problem.spec, ready.problem.groups[instance]
    touched = [name for name in spec.movable[instance] if name in ready.source]
    by_layer = groupby(touched, lambda name: spec.tensors[name].index.get("l"))
    slices = [ready.slices(instance, group.moments_dtype, list(names)) for _, names in by_layer]
    solve = assign if group.moments_dtype is torch.float32 else torch.linalg.svd

    def run(pool: Executor) -> None:
        products = list(pool.map(lambda xy: xy[0] @ xy[1].T, slices))
        gram = products[0]
        for product in products[1:]:
            gram += product
        solve(gram)

    return run


def _inside(ready: Ready, instance: Instance) -> Callable[[], object]:
    """An axis of one layer."""
    group = ready.problem.groups[instance]
    if instance.axis == "h":
        inner = [ready.slices(Instance(axis, instance.index), torch.float32) for axis in BATCHED]
        return lambda: assign(sum(nuclear_norms(_pairs(x.flatten(0, 1), y.flatten(0, 1), len(x))) for x, y in inner))
    x, y = ready.slices(instance, group.moments_dtype)
    if instance.axis in BATCHED:
        return lambda: torch.linalg.svd(x @ y.mT)
    return lambda: assign(x @ y.T)


def _pairs(x: Tensor, y: Tensor, heads: int) -> Tensor:
    gram = x @ y.T
    return gram.reshape(heads, -1, heads, len(y) // heads).permute(0, 2, 1, 3).double()


def rows(config: Mapping[str, Any], kind: str, threads: int) -> dict[str, Call]:
    ready = Ready.of(*pair(config, kind))
    return {FLOOR: floor(ready, threads), OURS: sweep(ready, threads)}


def cases(plan: Plan) -> Iterator[Case]:
    words = 100 if plan.quick else 20000
    cross = plan.cross()
    for sizes in cross:
        yield Case(sizes, {"pair": "RoBERTa, independent"}, partial(rows, roberta(**sizes, words=words), "independent"))
    for name, config, kind in (("RoBERTa", roberta, "fine-tune"), ("GPT-2", gpt2, "independent")):
        yield Case(cross[1], {"pair": f"{name}, {kind}"}, partial(rows, config(**cross[1], words=words), kind))


BENCHMARK = Benchmark(
    title="Residual sweep",
    about="""One sweep over the residual stream, the order of heads, inside heads, feed-forward and pooler, from the
original source: a RoBERTa, its stream permuted, and a GPT-2, its stream rotated in the frame; vocabularies of 20000.
The floor is the Gram products from prepared slices and the solves alone (assignments; one SVD for a rotation; nuclear
norms of all pairs of heads), layers with as many workers. It leaves out transforming the tensors (for a rotated
stream as many operations as its products), solving inside heads again where their order changes, and scales in turns.
Later sweeps cost less than the first.""",
    cases=cases,
    ours=OURS,
    floor=FLOOR,
    goals=(Goal(OURS, FLOOR, 1.3),),
)
