"""How long one sweep over all axes takes, against its floor in the same run: its Gram products and its solves alone.
And how long it takes to match a whole pair.

    python benchmarks/sweeps.py [--quick] [--threads 1,2] [--rounds 5] [--json results.json]

The pairs are synthetic and made in memory. Prints Markdown tables; what they say: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from _timing import Task, interleave, median, one_thread_each, ratio, spread
from torch import Tensor

import symfuse
from symfuse.architectures import Model
from symfuse.architectures.base import Config, lookup
from symfuse.groups import nuclear_norms
from symfuse.groups.assignment import assign
from symfuse.matching import match_models
from symfuse.matching.chosen import Chosen, choose
from symfuse.matching.descent import Sweeper
from symfuse.matching.moved import Moved
from symfuse.spec import Instance, expand
from symfuse.stats import features

AXES = "attention,ffn,heads,residual,pooler"
BATCHED = ("qk", "v")


@dataclass(frozen=True)
class Shape:
    """A published model's shape. optional: parts that the declaration leaves open, such as a pooler."""

    name: str
    config: Mapping[str, Any]
    optional: tuple[str, ...] = ()


def shapes(layers: int = 12, width: int = 768, vocabulary: int | None = None) -> tuple[Shape, ...]:
    """Post-norm, its residual stream permuted, with a pooler; and pre-norm, its stream rotated in the frame."""
    roberta = {
        "model_type": "roberta", "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": width // 64,
        "intermediate_size": 4 * width, "vocab_size": vocabulary or 50265, "max_position_embeddings": 514,
        "type_vocab_size": 1,
    }  # fmt: skip
    gpt2 = {
        "model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": width // 64, "n_positions": 1024,
        "vocab_size": vocabulary or 50257, "architectures": ["GPT2LMHeadModel"],
    }  # fmt: skip
    return (Shape("RoBERTa-base", roberta, ("pooler",)), Shape("GPT-2", gpt2))


def random_model(shape: Shape, seed: int) -> Model:
    """float32; Gaussian, with rows and columns of log-normal norms: spectra that fall as trained ones do."""
    rng = torch.Generator().manual_seed(seed)
    family = lookup(shape.config, shape.name).declare(Config(shape.config, shape.name))
    templates = dict(family.tensors)
    for part in shape.optional:
        templates |= family.optional[part]
    sizes = {name: axis.size for name, axis in family.axes.items()}
    state = {}
    for name, declared in expand(templates, family.axes).items():
        t = torch.randn(declared.layout.shape(sizes), generator=rng) * 0.03
        for dim in range(t.ndim):
            lengths = [-1 if d == dim else 1 for d in range(t.ndim)]
            t *= torch.randn(t.shape[dim], generator=rng).mul_(0.4).exp_().reshape(lengths)
        state[family.prefix + name] = t
    return Model.of(symfuse.open(state, config=shape.config, name=f"{shape.name} {seed}"))


def pair(shape: Shape, kind: str) -> tuple[Model, Model]:
    """source, anchor: independent; or one the other with 2 % of noise."""
    anchor = random_model(shape, 0)
    if kind == "independent":
        return random_model(shape, 1), anchor
    rng = torch.Generator().manual_seed(2)
    state = {n: t + 0.02 * t.std() * torch.randn(t.shape, generator=rng) for n, t in anchor.checkpoint.items()}
    return Model.of(symfuse.open(state, config=shape.config, name="fine-tune")), anchor


@dataclass(frozen=True)
class Ready:
    """A chosen pair in its frame, in memory."""

    chosen: Chosen
    anchor: Mapping[str, Tensor]
    source: Mapping[str, Tensor]

    @classmethod
    def of(cls, source: Model, anchor: Model) -> Ready:
        chosen = choose(source, anchor, AXES, None, scaling=True, frame=None)
        names = [name for name in chosen.spec.tensors if chosen.spec.shares(name, chosen.anchor.spec)]
        return cls(chosen, *({name: m.read(name) for name in names} for m in (chosen.anchor, chosen.source)))

    def slices(self, instance: Instance, dtype: torch.dtype, names: list[str] | None = None) -> tuple[Tensor, Tensor]:
        """The features [*b, n, k] of an axis, all of them side by side."""
        spec = self.chosen.spec
        touched = [name for name in spec.movable[instance] if name in self.source] if names is None else names
        found = [
            views
            for name in touched
            for _, views in features(spec, instance, name, self.anchor[name], self.source[name])
        ]
        x, y = (torch.cat([views[side].to(dtype) for views in found], -1) for side in (0, 1))
        return x, y


def sweep(ready: Ready, threads: int) -> Task:
    """One sweep, from the unmoved source."""
    spec, groups = ready.chosen.spec, ready.chosen.groups

    def run() -> None:
        with one_thread_each(threads) as pool:
            sweeper = Sweeper(spec, ready.anchor.__getitem__, list(groups), groups, pool, ())
            sweeper.sweep(Moved(spec, dict(ready.source)), random.Random(0))

    return run


def floor(ready: Ready, threads: int) -> Task:
    """The Gram products, from slices that lie ready in the groups' dtypes, and the solves: for a permutation the
    assignment, for rotations one SVD, for the order of heads nuclear norms of all pairs and the assignment; in as many
    workers, layers in parallel."""
    groups = ready.chosen.groups
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
    spec, group = ready.chosen.spec, ready.chosen.groups[instance]
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
    group = ready.chosen.groups[instance]
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


def whole(source: Model, anchor: Model, threads: int) -> dict[str, Any]:
    """Matching on all axes, once: seconds, and the squared distance after each sweep of each start."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = match_models(source, anchor, axes=AXES, threads=threads)
    seconds = {"seconds": time.perf_counter() - wall, "cpu seconds": time.process_time() - cpu}
    return seconds | {"descents": found.provenance["descents"]}


def measure(shape: Shape, threads: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each kind of pair and number of threads."""
    for kind in ("independent", "fine-tune"):
        source, anchor = pair(shape, kind)
        ready = Ready.of(source, anchor)
        for n in threads:
            times = interleave({"floor": floor(ready, n), "sweep": sweep(ready, n)}, rounds)
            yield {
                "pair": f"{shape.name}, {kind}",
                "threads": n,
                "load": os.getloadavg()[0],
                "floor": median(times.wall["floor"]),
                "sweep": median(times.wall["sweep"]),
                "noise": spread(times.wall["sweep"]),
                "ratio": ratio(times.wall, "sweep", "floor"),
                "cpu ratio": ratio(times.cpu, "sweep", "floor"),
                "rounds": {"wall": times.wall, "cpu": times.cpu},
                "whole": whole(source, anchor, n),
            }


def table(rows: list[dict[str, Any]]) -> str:
    head = [
        "| pair | threads | floor s | sweep s | ± | × floor | × floor, CPU | whole match s | sweeps of each start |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    body = [
        f"| {r['pair']} | {r['threads']} | {r['floor']:.2f} | {r['sweep']:.2f} | {r['noise']:.0%} | {r['ratio']:.2f} "
        f"| {r['cpu ratio']:.2f} | {r['whole']['seconds']:.1f} | "
        + ", ".join(f"{name}: {len(curve) - 1}" for name, curve in r["whole"]["descents"].items())
        + " |"
        for r in rows
    ]
    return "\n".join([*head, *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers, a small vocabulary, two rounds")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, default 1,2")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, default 5")
    parser.add_argument("--shape", help="only this shape, such as GPT-2")
    parser.add_argument("--json", type=Path, help="also write the data, every round of it, to this file")
    args = parser.parse_args()
    chosen = [s for s in (shapes(2, vocabulary=1000) if args.quick else shapes()) if args.shape in (None, s.name)]
    machine = {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "symfuse": symfuse.__version__,
    }
    print("; ".join(f"{key} {value}" for key, value in machine.items()) + "\n", flush=True)
    rows = []
    for shape in chosen:
        threads = [int(n) for n in args.threads.split(",")]
        rows += list(measure(shape, threads, 2 if args.quick else args.rounds))
        print(table(rows[-2 * len(threads) :]) + "\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
