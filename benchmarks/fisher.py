"""The diagonal Fisher information."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from _harness import NARROW, Benchmark, Call, Case, Goal, Plan
from _models import bert, texts
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from symfuse.stats.fisher import fisher_diagonal

WORDS = 1000
PASSES, OURS, PEER = "forward and backward passes", "Fisher, all at once", "Fisher, one by one"


def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: t for name, t in batch.items() if name != "labels"}
    return F.cross_entropy(module(**inputs).logits, batch["labels"], reduction="sum")


def rows(plan: Plan, sizes: Mapping[str, int], threads: int) -> dict[str, Call]:  # noqa: ARG001 - one
    module = bert("BertForSequenceClassification", **sizes, words=WORDS)
    parameters = [*module.parameters()]
    batches = texts(WORDS, 8, *((2, 8) if plan.quick else (16, 32)))
    rng = torch.Generator().manual_seed(1)
    for batch in batches:
        batch["labels"] = torch.randint(0, 2, (len(batch["input_ids"]),), generator=rng)

    def plain() -> None:
        for batch in batches:
            module.zero_grad()
            loss(module, batch).backward()

    def each() -> None:
        sums = [torch.zeros_like(p) for p in parameters]
        for batch in batches:
            for row in range(len(batch["labels"])):
                value = loss(module, {name: t[row : row + 1] for name, t in batch.items()})
                for total, gradient in zip(sums, torch.autograd.grad(value, parameters), strict=True):
                    total.addcmul_(gradient, gradient)

    return {PASSES: plain, OURS: lambda: fisher_diagonal(module, batches, loss), PEER: each}


def cases(plan: Plan) -> Iterator[Case]:
    for sizes in plan.cross(widths=NARROW):
        yield Case(sizes, {}, partial(rows, plan, sizes))


BENCHMARK = Benchmark(
    title="Fisher",
    about="""Squared gradients of each of 8 batches of 16 texts of 32 tokens, summed, of a BERT with two classes and
random weights, compared with forward and backward passes over the batches. It includes one comparison of two
examples, which takes about nine tenths of a batch, so fewer batches cost relatively more. "One by one" is a loop with
a backward pass for each text, for the families whose gradients cannot be squared in one pass (DeBERTa-v2, experts).""",
    cases=cases,
    ours=OURS,
    floor=PASSES,
    peers=(PEER,),
    goals=(Goal(OURS, PASSES, 1.3),),
    threaded=False,
)
