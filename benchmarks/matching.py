"""How long matching takes, against floors measured in the same run: the library calls that it cannot do without.

    python benchmarks/matching.py [--quick] [--threads 1,2] [--rounds 9] [--json results.json]

The pairs are synthetic and made in memory. Prints Markdown tables; what they say: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scipy
import torch
from _timing import Task, Times, interleave, median, one_thread_each, ratio, spread
from torch import Tensor

import symfuse
from symfuse.alignment import random_alignment
from symfuse.architectures import Model
from symfuse.architectures.base import Config, lookup
from symfuse.groups.assignment import assign
from symfuse.matching import match_models
from symfuse.spec import expand

sys.path.append(str(Path(__file__).parents[1] / "tests" / "reference"))
import naive

KINDS = ("independent", "fine-tune", "unbalanced")
FFN_LAYERS = 2  # timed, of however many there are


@dataclass(frozen=True)
class Shape:
    """A published model's shape; embeddings are cut down, since matching does not read them."""

    name: str
    config: Mapping[str, Any]

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def heads(self) -> int:
        return int(self.config["num_attention_heads"])


def _config(model_type: str, layers: int, width: int, **more: object) -> dict[str, Any]:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "hidden_size": width,
        "num_attention_heads": width // 64, "intermediate_size": 4 * width, "hidden_act": "gelu",
        "vocab_size": 64, "max_position_embeddings": 8, **more,
    }  # fmt: skip


SHAPES = (
    Shape("RoBERTa-base", _config("roberta", 12, 768, type_vocab_size=1)),
    Shape(
        "DeBERTa-v3-large",
        _config(
            "deberta-v2", 24, 1024, type_vocab_size=0, relative_attention=True, pos_att_type=["p2c", "c2p"],
            share_att_key=True, position_buckets=4, norm_rel_ebd="layer_norm", position_biased_input=False,
        ),
    ),
)  # fmt: skip


def random_model(shape: Shape, seed: int) -> dict[str, Tensor]:
    """float32; Gaussian, with rows and columns of log-normal norms: spectra that fall as trained ones do."""
    rng = torch.Generator().manual_seed(seed)
    family = lookup(shape.config, shape.name).declare(Config(shape.config, shape.name))
    sizes = {name: axis.size for name, axis in family.axes.items()}
    state = {}
    for name, declared in expand(family.tensors, family.axes).items():
        t = torch.randn(declared.layout.shape(sizes), generator=rng) * 0.03
        for dim in range(t.ndim):
            lengths = [-1 if d == dim else 1 for d in range(t.ndim)]
            t *= torch.randn(t.shape[dim], generator=rng).mul_(0.4).exp_().reshape(lengths)
        state[name] = t
    return state


def pair(shape: Shape, kind: str) -> tuple[Model, Model]:
    """source, anchor: independent; one the other with 2 % of noise; or with queries twice and keys half as large."""
    anchor = random_model(shape, 0)
    if kind == "fine-tune":
        rng = torch.Generator().manual_seed(2)
        source = {n: t + 0.02 * t.std() * torch.randn(t.shape, generator=rng) for n, t in anchor.items()}
    else:
        source = random_model(shape, 1)
    if kind == "unbalanced":
        for name, t in source.items():
            t *= 2 if ".self.query" in name else 0.5 if ".self.key" in name else 1
    opened = [symfuse.open(s, config=shape.config, name=n) for s, n in ((source, "source"), (anchor, "anchor"))]
    return Model.of(opened[0]), Model.of(opened[1])


def bert_names(model: Model) -> dict[str, Tensor]:
    """For the naive version, which knows only these."""
    return {name.replace("_proj.", "."): t for name, t in model.checkpoint.items()}


def attention_floor(source: Model, anchor: Model, shape: Shape, threads: int) -> Task:
    """The Gram products in float64, from slices that lie ready, and the SVDs of their sums; in as many workers."""
    jobs = []
    for layer in range(shape.layers):
        sides = [_sliced(bert_names(model), layer, shape.heads) for model in (anchor, source)]
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


def _sliced(state: Mapping[str, Tensor], layer: int, heads: int) -> Iterator[Tensor]:
    for part in ("query.", "key.", "value."):
        yield (naive.with_bias(state, naive.SELF.format(layer) + part).double().unflatten(0, (heads, -1)).contiguous())
    o = state[naive.OUTPUT.format(layer) + "weight"].T.double()
    yield o.unflatten(0, (heads, -1)).contiguous()


def ffn_floor(source: Model, anchor: Model, threads: int, solve: bool) -> Task:
    """The Gram products in float32 and the assignment; without `solve` the products alone."""
    states = [bert_names(model) for model in (anchor, source)]
    jobs = []
    for layer in range(FFN_LAYERS):
        names = naive.FFN_IN.format(layer), naive.FFN_OUT.format(layer) + "weight"
        jobs.append([(naive.with_bias(s, names[0]), s[names[1]].T.contiguous()) for s in states])

    def one(job: list[tuple[Tensor, Tensor]]) -> None:
        (x, x2), (y, y2) = job
        gram = (x @ y.T).addmm_(x2, y2.T)
        if solve:
            assign(gram)

    def run() -> None:
        with one_thread_each(threads) as pool:
            list(pool.map(one, jobs))

    return run


def attention_tasks(source: Model, anchor: Model, shape: Shape, threads: int) -> dict[str, Task]:
    def ours(**options: Any) -> Task:
        return lambda: match_models(source, anchor, axes="attention", threads=threads, **options)

    def plain() -> None:
        states = bert_names(source), bert_names(anchor)
        with one_thread_each(1):
            for layer in range(shape.layers):
                naive.match_attention(*states, layer, shape.heads)

    tasks = {
        "floor": attention_floor(source, anchor, shape, threads),
        "rotation": ours(scaling=False, biases=False),
        "rotation, then scale (one pass)": ours(one_pass=True, biases=False),
        "rotation and scale in turns": ours(biases=False),
        "… and biases": ours(),
    }
    return tasks | ({"per head, as published": plain} if threads == 1 else {})


def ffn_tasks(source: Model, anchor: Model, threads: int) -> dict[str, Task]:
    return {
        "floor": ffn_floor(source, anchor, threads, solve=True),
        "… its Gram products alone": ffn_floor(source, anchor, threads, solve=False),
        "permutation": lambda: match_models(
            source, anchor, axes="ffn", layers=tuple(range(FFN_LAYERS)), threads=threads, biases=False
        ),
    }


def naive_ffn(source: Model, anchor: Model) -> Task:
    """Cold assignment and the dense product, one layer, one thread."""
    states = bert_names(source), bert_names(anchor)

    def run() -> None:
        with one_thread_each(1):
            naive.apply_ffn(states[0], 0, naive.match_ffn(*states, 0))

    return run


def apply_tasks(source: Model, threads: int) -> dict[str, Task]:
    """Moving every tensor of the model (rotations, scales, permutations, translations), against copying its bytes."""
    alignment = random_alignment(source.spec, 0, axes=("qk", "v", "ffn"))
    linear = replace(alignment, shifts={})

    def read(model: Mapping[str, Tensor], clone: bool = False) -> None:
        torch.set_num_threads(threads)
        for name in model:
            tensor = model[name]
            if clone:
                tensor.clone()

    return {
        "copy": lambda: read(source.checkpoint, clone=True),
        "rotations, scales, permutations": lambda: read(linear(source.checkpoint)),
        "… and translations": lambda: read(alignment(source.checkpoint)),
    }


def rows(times: Times, base: str, scale: float = 1.0) -> list[dict[str, Any]]:
    """One row for each task: seconds, the noise of that figure, and the ratio to the base."""
    return [
        {
            "task": name,
            "seconds": median(times.wall[name]) * scale,
            "noise": spread(times.wall[name]),
            "ratio": ratio(times.wall, name, base),
            "cpu ratio": ratio(times.cpu, name, base),
            "rounds": times.wall[name],
        }
        for name in times.wall
    ]


def cold(source: Model, anchor: Model, shape: Shape, floor: float) -> dict[str, Any]:
    """The row of the naive feed-forward, run once: it takes long."""
    times = interleave({"dense": naive_ffn(source, anchor)}, 1)
    seconds = times.wall["dense"][0] * shape.layers
    ratios = {"ratio": seconds / floor, "cpu ratio": times.cpu["dense"][0] * shape.layers / floor}
    return {"task": "as published (one layer, once)", "seconds": seconds, "noise": 0.0, "rounds": [seconds]} | ratios


def table(title: str, lines: list[dict[str, Any]], base: str) -> str:
    head = [f"### {title}", "", f"| | seconds | ± | × {base} | × {base}, CPU |", "|---|--:|--:|--:|--:|"]
    body = [
        f"| {r['task']} | {r['seconds']:.3f} | {r['noise']:.0%} | {r['ratio']:.2f} | {r['cpu ratio']:.2f} |"
        for r in lines
    ]
    return "\n".join([*head, *body, ""])


def measure(shape: Shape, threads: list[int], rounds: int, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Every section of one shape, as data."""
    for kind in kinds:
        source, anchor = pair(shape, kind)
        for n in threads:
            where = f"{shape.name}, {kind}, {n} thread{'s' if n > 1 else ''}"
            times = interleave(attention_tasks(source, anchor, shape, n), rounds)
            yield {"title": f"Attention: {where}", "base": "floor", "rows": rows(times, "floor")}
            if kind == "unbalanced":  # the same feed-forward as "independent"
                continue
            times = interleave(ffn_tasks(source, anchor, n), rounds)
            scale = shape.layers / FFN_LAYERS
            title = f"Feed-forward: {where} ({FFN_LAYERS} layers timed, seconds × {scale:g})"
            lines = rows(times, "floor", scale)
            if n == 1:
                lines.append(cold(source, anchor, shape, lines[0]["seconds"]))
            yield {"title": title, "base": "floor", "rows": lines}
        if kind == "independent":
            for n in threads:
                where = f"{shape.name}, {n} thread{'s' if n > 1 else ''}"
                times = interleave(apply_tasks(source, n), rounds)
                yield {"title": f"Applying: {where}", "base": "copy", "rows": rows(times, "copy")}


# (what, goal, the titles that it concerns, the row, the row that it is measured against, as a share added to it)
SUMMARY = (
    ("rotation × floor", "≤ 1.3", "Attention", "rotation", "floor", False),
    ("feed-forward × floor", "≤ 1.3", "Feed-forward", "permutation", "floor", False),
    ("scale in one pass, added to the rotation", "< 15 %", "Attention", "rotation, then scale", "rotation", True),
    ("scale in turns, added: fine-tunes", "< 15 %", "Attention fine-tune", "rotation and scale", "rotation", True),
    ("scale in turns, added: independent", "< 15 %", "Attention independent", "rotation and scale", "rotation", True),
    ("scale in turns, added: unbalanced", "< 15 %", "Attention unbalanced", "rotation and scale", "rotation", True),
    ("biases, added to all of that", "", "Attention", "… and biases", "rotation and scale", True),
    ("attention as published × rotation in one pass", "", "Attention", "per head", "rotation, then scale", False),
    ("feed-forward as published × ours", "", "Feed-forward", "as published", "permutation", False),
    ("applying × copy", "", "Applying", "rotations, scales", "copy", False),
)


def summary(sections: list[dict[str, Any]]) -> str:
    """Each goal with the least and the greatest ratio of processor times over all shapes, kinds and threads."""
    lines = ["| | goal | found |", "|---|--:|--:|"]
    for what, goal, titles, task, base, added in SUMMARY:
        found = []
        for section in sections:
            rows = {row["task"]: row["cpu ratio"] for row in section["rows"]}
            of = [next((r for name, r in rows.items() if name.startswith(t)), None) for t in (task, base)]
            if all(word in section["title"] for word in titles.split()) and None not in of:
                found.append(of[0] / of[1])  # type: ignore[operator]
        if found:
            low, high = min(found), max(found)
            shown = f"+ {low - 1:.0%} to {high - 1:.0%}" if added else f"{low:.2f} to {high:.2f}"
            lines.append(f"| {what} | {goal} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller shape, four layers, three rounds")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, default 1,2")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds, default 9")
    parser.add_argument("--json", type=Path, help="also write the data, every round of it, to this file")
    args = parser.parse_args()
    shapes: tuple[Shape, ...] = SHAPES
    if args.quick:
        shapes = (Shape("RoBERTa-base cut to 4 layers", dict(SHAPES[0].config, num_hidden_layers=4)),)
    machine = {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "scipy": scipy.__version__,
        "symfuse": symfuse.__version__,
    }
    print("; ".join(f"{key} {value}" for key, value in machine.items()) + "\n")
    sections = []
    for shape in shapes:
        threads = [int(n) for n in args.threads.split(",")]
        for section in measure(shape, threads, 3 if args.quick else args.rounds, KINDS):
            print(table(section["title"], section["rows"], section["base"]), flush=True)
            sections.append(section)
    print("### Summary, in processor time\n\n" + summary(sections) + "\n")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "sections": sections}, indent=1))


if __name__ == "__main__":
    main()
