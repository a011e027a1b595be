"""Orders inside of orders are found again: the heads in blocks of state space models, with their channels and states,
and experts in groups."""

from __future__ import annotations

import pytest
import torch

from contract.tiny import case
from symfuse.alignment import random_alignment
from symfuse.api import match
from symfuse.matching import match_by_activations
from symfuse.model import Model

AXES = {"mamba2-lm": {"ssm_m", "ssm_h", "scanned", "states"}, "falcon-mamba": {"scanned", "states", "rank"}}


@pytest.mark.parametrize("label", AXES)
def test_from_activations(label: str) -> None:
    """The class does not call the map of step sizes: of the space before it the outputs of what writes it are used."""
    this = case(label)
    moved = random_alignment(this.spec, 5, AXES[label])(this.checkpoint)
    ids = torch.randint(0, 61, (16, 24), generator=torch.Generator().manual_seed(0))
    found = match_by_activations(Model.of(moved), Model.of(this.checkpoint), [{"input_ids": ids}], axes="scan,heads")
    assert {instance.axis for instance in found.elements} == AXES[label]
    torch.testing.assert_close(dict(found(moved)), dict(this.checkpoint), rtol=0, atol=1e-5)


@pytest.mark.parametrize("label", [*AXES, "solar-open-lm"])
def test_from_weights(label: str) -> None:
    this = case(label)
    moved = random_alignment(this.spec, 5, AXES.get(label, {"g", "e"}))(this.checkpoint)
    found = match(moved, to=this.checkpoint, axes="scan,heads" if label in AXES else "experts,ffn")
    torch.testing.assert_close(dict(found(moved)), dict(this.checkpoint), rtol=0, atol=1e-10)
