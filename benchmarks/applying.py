"""Applying an alignment to all tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from _harness import ROOT, Benchmark, Call, Case, Plan, one_thread_each
from _models import HEAD, for_naive, random_model, roberta
from torch import Tensor

from symfuse.alignment import random_alignment

sys.path.append(str(ROOT / "tests" / "reference"))
import naive

COPY, OURS, DEFAULT = "copy", "rotations, scales, permutations", "… and translations"
PEER = "as published: dense matrices"


def rows(sizes: Mapping[str, int], threads: int) -> dict[str, Call]:
    source = random_model(roberta(**sizes), 0)
    alignment = random_alignment(source.spec, 0, axes=("qk", "v", "ffn"))
    linear = replace(alignment, shifts={})
    state, width = for_naive(source), sizes["width"]
    heads = [naive.Head(torch.linalg.qr(torch.randn(HEAD, HEAD).double())[0], 1.1) for _ in range(width // HEAD)]
    permutation = torch.eye(4 * width)[torch.randperm(4 * width)]

    def moved(model: Mapping[str, Tensor]) -> Call:
        """Every tensor, read in workers, as they are when they are written."""

        def run() -> None:
            with one_thread_each(threads) as pool:
                list(pool.map(lambda name: model[name].clone() if model is source.checkpoint else model[name], model))

        return run

    def published() -> None:
        for layer in range(sizes["layers"]):
            naive.apply_attention(state, layer, heads, heads)
            naive.apply_ffn(state, layer, permutation)

    return {
        COPY: moved(source.checkpoint),
        OURS: moved(linear(source.checkpoint)),
        DEFAULT: moved(alignment(source.checkpoint)),
        PEER: published,
    }


def cases(plan: Plan) -> Iterator[Case]:
    for sizes in plan.cross():
        yield Case(sizes, {}, partial(rows, sizes))


BENCHMARK = Benchmark(
    title="Applying",
    about="""Every tensor of a RoBERTa is transformed by random elements of attention and feed-forward, compared with
a copy of every tensor. As published: the products with dense matrices, head by head in float64, and for neurons with
the 0/1 matrix in float32.""",
    cases=cases,
    ours=OURS,
    floor=COPY,
    peers=(PEER,),
)
