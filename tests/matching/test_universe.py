"""Many models without an anchor: the spread falls, cycles close, and functions stay."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import symfuse
from contract.tiny import MODELS
from symfuse.alignment import random_alignment
from symfuse.errors import OptionError
from symfuse.io import Checkpoint
from symfuse.matching import match_universe
from symfuse.matching.universe import Universe
from symfuse.model import Model

AXES = "attention,ffn,heads,residual"


def family(count: int, noise: float) -> list[Checkpoint]:
    """One model moved by random elements of what AXES can find, each copy with noise of its own."""
    base = MODELS["bert-mlm"]()
    found = []
    for seed in range(count):
        moved = random_alignment(symfuse.declare(base), seed, axes=("h", "qk", "v", "ffn", "residual"))(base)
        rng = torch.Generator().manual_seed(seed)
        tensors = {}
        for name in moved:
            t = moved[name]
            tensors[name] = t + noise * torch.randn(t.shape, generator=rng, dtype=t.dtype) * t.std(correction=0)
        found.append(Checkpoint(tensors, moved.config, name=f"m{seed}"))
    return found


@cache
def three() -> tuple[list[Checkpoint], Universe]:
    models = family(3, 1e-3)
    return models, match_universe([Model.of(m) for m in models], axes=AXES)


def test_all_come_together_and_keep_what_they_compute() -> None:
    models, found = three()
    assert found.curve[1] < 1e-3 * found.curve[0]
    assert list(found.curve[1:]) == sorted(found.curve[1:], reverse=True)
    for model, alignment in zip(models, found.alignments, strict=True):
        assert symfuse.prove(model, alignment).exact.equal


def test_going_round_a_cycle_is_the_identity() -> None:
    models, found = three()
    g = found.alignments
    steps = [g[(i + 1) % 3].inverse() @ g[i] for i in range(3)]  # from each model to the next, through the mean
    round_trip = steps[2] @ steps[1] @ steps[0]
    back = round_trip(models[0])
    for name in back:
        torch.testing.assert_close(back[name], models[0][name], rtol=1e-9, atol=1e-9)


def test_pairwise_matches_of_unrelated_models_do_not_close() -> None:
    models = [MODELS["bert-mlm"](seed) for seed in range(3)]
    steps = [symfuse.match(models[i], to=models[(i + 1) % 3], axes="ffn") for i in range(3)]
    back = (steps[2] @ steps[1] @ steps[0])(models[0])
    name = next(name for name in back if name.endswith("intermediate.dense.weight"))
    assert not torch.equal(back[name], models[0][name])


def test_align_by_name() -> None:
    models = family(2, 0.0)
    aligned = symfuse.align(models, anchor="universe", axes=AXES)
    assert aligned.anchor is None
    assert len(aligned.alignments) == 2
    assert symfuse.relate(*aligned.checkpoints).distance.relative < 1e-6


def test_one_model_is_no_universe() -> None:
    with pytest.raises(OptionError, match="needs two models"):
        match_universe([Model.of(MODELS["bert-mlm"]())])
