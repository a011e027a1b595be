"""Merging, tensor by tensor: the interface of methods, the blocks that they read, and the engine that plans and
streams."""

from __future__ import annotations

from symfuse.merging.base import Method, Parameter, PerModel
from symfuse.merging.engine import Merged, Output, Slice, Term, merge_slices
from symfuse.merging.stream import Block, Source, Stream

__all__ = [
    "Block", "Merged", "Method", "Output", "Parameter", "PerModel", "Slice", "Source", "Stream", "Term", "merge_slices",
]  # fmt: skip
