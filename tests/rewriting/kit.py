"""Models of the tests of canonical forms: the real classes of the contract tests, and one linear toy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from contract.tiny import Case, case, encoder, real
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.spec import Axis, Spec, expand
from symfuse.verification import random_inputs, run

ALL = ("untie", "fold_norms", "centre", "drop_gauges", "balance")
SCALED = ("untie", "fold_scales", *ALL[1:])
# label → all rewrites that it allows. The stream of an encoder without a final norm is its output: not centred.
FRAMES = {
    "gpt2-lm": ALL,
    "gpt2-sequence": ALL,
    "vit-classification": ALL,
    "dinov2-classification": SCALED,
    "encoder": ("fold_norms", "drop_gauges", "balance"),
}
LABELS = list(FRAMES)


@cache
def pre_norm(label: str) -> Case:
    if label != "encoder":
        return case(label)
    return case_for(encoder(hidden_act="gelu", norm_first=True))


def case_for(checkpoint: Checkpoint) -> Case:
    """What the real class computes with a checkpoint, on random inputs."""
    module = real(checkpoint)
    inputs = random_inputs(module, checkpoint.config)
    return Case(checkpoint, Model.of(checkpoint).spec, inputs, run(module, inputs))


def model_of(label: str) -> Model:
    return Model.of(pre_norm(label).checkpoint)


def changed(checkpoint: Checkpoint, values: Mapping[str, Tensor]) -> Checkpoint:
    """The checkpoint in memory with other values for some tensors, by name in the file."""
    return Checkpoint({**dict(checkpoint), **values}, checkpoint.config, name=checkpoint.name)


def toy(tensors: Mapping[str, Tensor], layouts: Mapping[str, str], axes: Mapping[str, Axis], **more: object) -> Model:
    """Tensors under a declaration of their own; the config is that of a family without tied heads."""
    spec = Spec("torch_transformer_encoder", axes, expand(layouts, axes), **more)  # type: ignore[arg-type]
    return Model(Checkpoint(dict(tensors), dict(encoder().config), name="toy"), spec)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
