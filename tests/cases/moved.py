"""A model that was moved, or half of it: what the real class says of that."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from contract.tiny import Case, real
from symfuse import api
from symfuse.alignment import Alignment
from symfuse.io import Checkpoint
from symfuse.verification import random_inputs, run

EXACT, BROKEN = 1e-12, 1e-3  # the largest error of what is a symmetry, and the least of what is none


def case_of(checkpoint: Checkpoint) -> Case:
    module = real(checkpoint)
    inputs = random_inputs(module, checkpoint.config)
    return Case(checkpoint, api.declare(checkpoint), inputs, run(module, inputs))


def left_behind(this: Case, g: Alignment, names: Iterable[str]) -> float:
    """The error of the moved model in which these tensors, by name in the file, stayed as they were."""
    kept = {name: this.checkpoint[name] for name in names}
    moved = g(this.checkpoint)
    for name in kept:
        assert not torch.equal(moved[name], kept[name]), name
    return this.error(moved.replace(tensors={**moved, **kept}), g)
