"""Moments of activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from _harness import NARROW, Benchmark, Call, Case, Goal, Plan
from _models import HEAD, bert, texts
from torch import nn

from symfuse.architectures import resolve
from symfuse.groups import Group
from symfuse.spec import Instance, Spec
from symfuse.stats.activations import moments_of, record
from symfuse.stats.taps import Tap, taps

WORDS = 1000
FORWARD, PRODUCTS = "forward passes", "Gram products alone"
LISTENING, OURS = "forward passes with recording", "moments of all axes"


def gpt2(width: int, layers: int, seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=width, n_layer=layers, n_head=width // HEAD)
    return transformers.GPT2Model(config).eval()


def declared(module: nn.Module) -> tuple[Spec, dict[Instance, Group]]:
    """The declaration of a module, and the group of each of its axes, without scales as they are by default."""
    config = module.config.to_dict() | {"architectures": [type(module).__name__]}  # type: ignore[union-attr, operator]
    spec = resolve(config, list(module.state_dict()))
    found = ((instance, spec.axes[instance.axis].group) for instance in spec.movable)
    return spec, {instance: group.without_scaling() for instance, group in found if group is not None}


def rows(plan: Plan, sizes: Mapping[str, int], kind: str, threads: int) -> dict[str, Call]:  # noqa: ARG001 - one
    width, layers = sizes["width"], sizes["layers"]
    if kind == "BERT":
        modules = [bert("BertModel", width, layers, WORDS, seed, add_pooling_layer=False) for seed in (0, 1)]
    else:
        modules = [gpt2(width, layers, seed) for seed in (0, 1)]
    anchor, source = modules
    batches = texts(WORDS, 2, *((2, 8) if plan.quick else (16, 64)))
    spec, groups = declared(anchor)
    where = taps(spec, anchor, groups)
    wanted: list[Tap] = list(dict.fromkeys(tap for found in where.values() for tap in found))
    positions = batches[0]["input_ids"].numel()
    ready = {p.layout.shape(spec.sizes)[0]: torch.randn(positions, p.layout.shape(spec.sizes)[0]) for p in wanted}

    def forward() -> None:
        with torch.inference_mode():
            for batch in batches:
                for module in modules:
                    module(**batch)

    def products() -> None:
        for _ in batches:
            for tap in wanted:
                x = ready[tap.layout.shape(spec.sizes)[0]]
                torch.mm(x.T, x)

    def moments() -> None:
        recorded = record(spec, anchor, source, batches, wanted)
        for instance, found in where.items():
            moments_of(spec, instance, {tap: recorded[tap] for tap in found}, groups[instance])

    return {
        FORWARD: forward,
        PRODUCTS: products,
        LISTENING: lambda: record(spec, anchor, source, batches, wanted),
        OURS: moments,
    }


def cases(plan: Plan) -> Iterator[Case]:
    cross = plan.cross(widths=NARROW)
    for kind in ("BERT", "GPT-2"):
        for sizes in cross if kind == "BERT" else cross[1:2]:
            yield Case(sizes, {"model": kind}, partial(rows, plan, sizes, kind))


BENCHMARK = Benchmark(
    title="Moments of activations",
    about="""Two models without heads, of random weights, in float32, on 2 batches of 16 texts of 64 tokens. The
floor is plain forward passes of both. The next row is the Gram products of all recorded modules, on prepared numbers.
Nearly all of these are for the feed-forward neurons: two thirds of a model's own multiplications for every token,
none of which can be left out in float32 over all positions. With a language modelling head, which the passes run too,
the share is lower.""",
    cases=cases,
    ours=OURS,
    floor=FORWARD,
    goals=(Goal(OURS, FORWARD, 1.5),),
    threaded=False,
)
