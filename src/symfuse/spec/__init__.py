"""Declarations as data: the layout language, axes, specs."""

from __future__ import annotations

from symfuse.spec.layout import Atom, Layout, Segment, Variance, parse
from symfuse.spec.spec import Axis, Declared, Instance, Shift, Spec, expand, indices

__all__ = [
    "Atom",
    "Axis",
    "Declared",
    "Instance",
    "Layout",
    "Segment",
    "Shift",
    "Spec",
    "Variance",
    "expand",
    "indices",
    "parse",
]
