"""Declarations as data: the layout language, axes, specs."""

from __future__ import annotations

from symfuse.spec.layout import Atom, Layout, Segment, Variance, cut, parse
from symfuse.spec.spec import (
    BEHIND,
    Axis,
    Declared,
    Instance,
    Memo,
    NormKind,
    Occurrence,
    Shift,
    Spec,
    anatomy,
    bias_of,
    expand,
    indices,
    layer_of,
    pieces_of,
)

__all__ = [
    "BEHIND",
    "Atom",
    "Axis",
    "Declared",
    "Instance",
    "Layout",
    "Memo",
    "NormKind",
    "Occurrence",
    "Segment",
    "Shift",
    "Spec",
    "Variance",
    "anatomy",
    "bias_of",
    "cut",
    "expand",
    "indices",
    "layer_of",
    "parse",
    "pieces_of",
]  # fmt: skip
