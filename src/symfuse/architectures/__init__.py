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
from symfuse.architectures.model import Model, require_floating, require_same_frame, require_same_shape
from symfuse.architectures.variants import VARIANTS, require_variants, vary, with_split

__all__ = [
    "ARCHITECTURES",
    "VARIANTS",
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
    "require_same_frame",
    "require_same_shape",
    "require_variants",
    "resolve",
    "roberta",
    "torch_encoder",
    "vary",
    "vit",
    "with_split",
]
