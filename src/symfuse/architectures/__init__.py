"""Every family that symfuse knows, one short file each."""

from __future__ import annotations

from symfuse.architectures import bert, deberta_v2, distilbert, electra, gpt2, roberta, torch_encoder, vit
from symfuse.architectures.base import (
    ARCHITECTURES,
    Architecture,
    Config,
    Family,
    Head,
    architecture,
    lookup,
    resolve,
)
from symfuse.architectures.model import Model, require_floating, require_same_shape

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Config",
    "Family",
    "Head",
    "Model",
    "architecture",
    "bert",
    "deberta_v2",
    "distilbert",
    "electra",
    "gpt2",
    "lookup",
    "require_floating",
    "require_same_shape",
    "resolve",
    "roberta",
    "torch_encoder",
    "vit",
]
