"""A real causal language model, moved by random elements of its whole group, and found again from its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import symfuse
from symfuse.alignment import random_alignment
from symfuse.demo import packages
from symfuse.io import Checkpoint
from symfuse.matching.problem import ROTATABLE
from symfuse.model import Model
from symfuse.rewriting import canonical

pytestmark = [pytest.mark.slow, pytest.mark.data, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    pytest.importorskip("gguf", reason="gguf is not installed; it comes with the extra `experiments`")
    if reason := packages.available(packages.SMOLLM2):
        pytest.skip(reason)
    return symfuse.open(packages.smollm2())


@pytest.mark.parametrize("frame", [(), ROTATABLE], ids=["as it is", "rotatable"])
def test_the_whole_group_keeps_what_a_real_model_computes(smollm2: Checkpoint, frame: tuple[str, ...]) -> None:
    """Logits of random tokens, in float64 (norms compute in float32)."""
    model = canonical(Model.of(smollm2), frame)
    alignment = replace(random_alignment(model.spec, 0, largest=True), frame=frame)
    proof = symfuse.prove(smollm2, alignment)
    assert proof.exact.worst < 1e-5
    assert proof.rounding < 1e-4


def test_one_wrong_axis_is_noticed(smollm2: Checkpoint) -> None:
    """Neurons that are moved in two of their three matrices only."""
    model = Model.of(smollm2)
    moved = random_alignment(model.spec, 0, ["ffn"])(smollm2)
    name = "model.layers.17.mlp.gate_proj.weight"
    wrong = moved.replace(tensors={**moved, name: smollm2[name]})
    assert not symfuse.verify(smollm2, wrong).equal


def test_what_moved_it_is_found_again(smollm2: Checkpoint) -> None:
    """Attention and neurons of all layers; all axes, which take minutes: experiments/causal.py."""
    axes = ["c", "v", "kv", "q", "ffn"]
    anchor = random_alignment(Model.of(smollm2).spec, 1, axes)(smollm2)
    anchor = anchor.replace(tensors=dict(anchor))
    back = symfuse.match(smollm2, to=anchor, axes="attention,heads,ffn")(smollm2)
    for name in anchor:
        torch.testing.assert_close(back[name], anchor[name], rtol=1e-4, atol=1e-4)
