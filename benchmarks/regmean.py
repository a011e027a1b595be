"""RegMean: Gram matrices of what is read, and the solves."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from _harness import NARROW, Benchmark, Call, Case, Goal, Plan
from _models import bert, texts
from torch import Tensor, nn

import symfuse
from symfuse.merging import Source, Stream
from symfuse.methods import lookup
from symfuse.model import Model
from symfuse.stats.gram import gram_matrices
from symfuse.stats.statistics import Statistics

WORDS = 1000
FLOOR, OURS, BOUNDED = "passes, products, solves", "RegMean", "RegMean in a third of the memory"


def merged(models: Sequence[Model], statistics: Sequence[Statistics]) -> list[Tensor]:
    """All tensors, by the method."""
    method, out = lookup("regmean"), []
    for name in models[0].spec.tensors:
        tensors = [model.read(name) for model in models]
        known = [one.of(name) for one in statistics]
        stream = Stream(name, tensors[0].shape, [Source.of(t) for t in tensors], statistics=known)
        out += list(method(stream, {"weight": [0.5, 0.5]}))
    return out


class Floor:
    """What any RegMean does: forward passes, then Gram products of numbers that lie ready (float32, whole, one for each
    input that maps read), then one factorisation and solve for each weight (float64)."""

    def __init__(self, modules: Sequence[nn.Module], models: Sequence[Model], batches: Sequence[dict[str, Tensor]]):
        self.modules, self.batches = modules, batches
        found = gram_matrices(modules[0], batches[:1], models[0].spec.tensors)
        self.widths = [found.infos[f"{entry}.gram"].shape[0] for entry in {i.entry for i in found.inputs.values()}]
        self.weights = [[model.read(name).double().T for model in models] for name in found.inputs]
        count = int(batches[0]["attention_mask"].sum())
        self.ready = {width: torch.randn(count, width) for width in set(self.widths)}
        self.grams = {width: (x.T @ x / count).double() for width, x in self.ready.items()}
        for gram in self.grams.values():
            gram.diagonal().mul_(1.1)

    def __call__(self) -> None:
        with torch.inference_mode():
            for module in self.modules:
                for batch in self.batches:
                    module(**batch)
        for _ in range(len(self.modules) * len(self.batches)):
            for width in self.widths:
                torch.mm(self.ready[width].T, self.ready[width])
        for weights in self.weights:
            gram = self.grams[len(weights[0])]
            left, right = gram + gram, gram @ weights[0] + gram @ weights[1]
            torch.cholesky_solve(right, torch.linalg.cholesky(left))


def rows(plan: Plan, sizes: Mapping[str, int], threads: int) -> dict[str, Call]:  # noqa: ARG001 - one
    modules = [bert("BertModel", **sizes, words=WORDS, seed=seed) for seed in (0, 1)]
    models = [Model.of(symfuse.open(module, name=str(seed))) for seed, module in enumerate(modules)]
    batches = texts(WORDS, 2, *((4, 8) if plan.quick else (16, 64)), padded=True)
    names = models[0].spec.tensors

    def collect() -> list[Statistics]:
        return [gram_matrices(module, batches, names) for module in modules]

    sums = [8 * info.shape[0] * (info.shape[0] + 1) for info in collect()[0].infos.values()]
    memory = max(*sums, sum(sums) // 3)  # with less than the largest it does not run

    def bounded() -> None:
        with tempfile.TemporaryDirectory(dir=plan.work) as folder:
            places = [Path(folder, str(i)) for i in range(2)]
            for place in places:
                place.mkdir()
            found = [
                gram_matrices(module, batches, names, memory=memory, scratch=place)
                for module, place in zip(modules, places, strict=True)
            ]
            merged(models, found)

    return {FLOOR: Floor(modules, models, batches), OURS: lambda: merged(models, collect()), BOUNDED: bounded}


def cases(plan: Plan) -> Iterator[Case]:
    for sizes in plan.cross(widths=NARROW):
        yield Case(sizes, {}, partial(rows, plan, sizes))


BENCHMARK = Benchmark(
    title="RegMean",
    about="""Two BERTs of random weights on 2 batches of 16 texts of 64 tokens, an eighth of them padding: collecting
the Gram matrices of both and merging all tensors. The floor is plain forward passes, then the Gram products (float32,
whole) of prepared numbers, one for each input of linear maps, then one factorisation and solve for each weight
(float64). With a third of the memory that the sums take (8 n² bytes per input of width n), the passes run again for
each group of layers that fits; finished parts are kept in files.""",
    cases=cases,
    ours=OURS,
    floor=FLOOR,
    goals=(Goal(OURS, FLOOR, 1.5),),
    threaded=False,
)
