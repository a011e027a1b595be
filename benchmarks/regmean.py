"""How long RegMean takes, against what it cannot do without: python benchmarks/regmean.py [--rounds 5]

all-MiniLM-L6-v2 and its fine-tune (real weights, of the demo's packages) on the same batches of random tokens, an
eighth of them padding. The floor is, in the same rounds, plain forward passes, then Gram products of numbers that lie
ready (float32, whole, one for each input that maps read), then one factorisation and solve for each weight (float64).
Prints a Markdown table, and the memory that the sums take.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from _timing import Task, interleave, median, ratio, spread
from torch import Tensor, nn

import symfuse
from symfuse.architectures import Model
from symfuse.demo.packages import minilm, minilm_finetuned
from symfuse.guided import lookup
from symfuse.io import open as open_checkpoint
from symfuse.merging import Source, Stream
from symfuse.modules import live
from symfuse.stats.gram import gram_matrices
from symfuse.stats.statistics import Statistics

ROWS, LENGTH = 32, 64
FLOOR, ALL = "floor: the three", "RegMean"


def texts(count: int) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[: ROWS // 4, LENGTH // 2 :] = 0
    ids = torch.randint(1000, 30000, (count, ROWS, LENGTH), generator=rng)
    return [{"input_ids": one * mask, "attention_mask": mask} for one in ids]


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
    """What any RegMean does."""

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

    def forward(self) -> None:
        with torch.inference_mode():
            for module in self.modules:
                for batch in self.batches:
                    module(**batch)

    def products(self) -> None:
        for _ in range(len(self.modules) * len(self.batches)):
            for width in self.widths:
                torch.mm(self.ready[width].T, self.ready[width])

    def solves(self) -> None:
        for weights in self.weights:
            gram = self.grams[len(weights[0])]
            left, right = gram + gram, gram @ weights[0] + gram @ weights[1]
            torch.cholesky_solve(right, torch.linalg.cholesky(left))

    def all(self) -> None:
        self.forward()
        self.products()
        self.solves()


def tasks(batches: Sequence[dict[str, Tensor]]) -> tuple[dict[str, Task], Statistics, int]:
    models = [Model.of(open_checkpoint(folder)) for folder in (minilm(), minilm_finetuned())]
    modules = [live(model.checkpoint, torch.float32) for model in models]
    names = models[0].spec.tensors
    floor = Floor(modules, models, batches)

    def collect() -> list[Statistics]:
        return [gram_matrices(module, batches, names) for module in modules]

    def bounded() -> None:
        with tempfile.TemporaryDirectory() as folder:
            places = [Path(folder, str(i)) for i in range(2)]
            for place in places:
                place.mkdir()
            found = [
                gram_matrices(module, batches, names, memory=nbytes // 3, scratch=place)
                for module, place in zip(modules, places, strict=True)
            ]
            merged(models, found)

    statistics = collect()
    nbytes = sum(8 * info.numel for info in statistics[0].infos.values())
    return (
        {
            "forward passes": floor.forward,
            "Gram products": floor.products,
            "solves": floor.solves,
            FLOOR: floor.all,
            "collecting (forward passes, products)": collect,
            "merging (solves, averages)": lambda: merged(models, statistics),
            ALL: lambda: merged(models, collect()),
            "RegMean in a third of the memory": bounded,
        },
        statistics[0],
        nbytes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, default 5")
    parser.add_argument("--batches", type=int, default=4, help=f"batches of {ROWS} texts of {LENGTH} tokens, default 4")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    versions = f"torch {torch.__version__}; transformers {transformers.__version__}; symfuse {symfuse.__version__}"
    print(f"cores {os.cpu_count()}; load {os.getloadavg()}; platform {platform.platform()}; {versions}")
    print(f"{options.batches} batches of {ROWS} texts of {LENGTH} tokens; {options.rounds} rounds\n")
    ways, statistics, nbytes = tasks(texts(options.batches))
    times = interleave(ways, options.rounds)
    print(f"| | seconds | ± | × {FLOOR} | × {FLOOR}, CPU |\n|---|--:|--:|--:|--:|")
    for task, wall in times.wall.items():
        ratios = [ratio(one, task, FLOOR) for one in (times.wall, times.cpu)]
        print(f"| {task} | {median(wall):.3f} | {spread(wall):.0%} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    entries = len({given.entry for given in statistics.inputs.values()})
    print(
        f"\n{len(statistics.inputs)} weights read {entries} inputs, whose sums take {nbytes / 1e6:.0f} MB in float64 a "
        f"model while they are collected, half of it after; peak of this process {peak / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
