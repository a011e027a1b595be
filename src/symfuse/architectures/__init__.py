"""Every family that symfuse knows, one short file each."""

from __future__ import annotations

from symfuse.architectures import bert, gpt2, torch_encoder
from symfuse.architectures.model import Model, require_same_shape
from symfuse.architectures.base import ARCHITECTURES, Architecture, Config, Family, Head, architecture, lookup, resolve

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Config",
    "Family",
    "Head",
    "Model",
    "architecture",
    "bert",
    "gpt2",
    "lookup",
    "require_same_shape",
    "resolve",
    "torch_encoder",
]
