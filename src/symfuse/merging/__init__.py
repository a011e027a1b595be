"""Merging: one file per method, registered when it is imported; what is shared stands in `stream` and `engine`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from symfuse.merging.base import METHODS, Method, Parameter, PerModel, lookup, method
from symfuse.merging.engine import Merged, Output, Slice, Term, merge_slices
from symfuse.merging.models import merge_models
from symfuse.merging.stream import Block, Source, Stream

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "METHODS",
    "Block",
    "Merged",
    "Method",
    "Output",
    "Parameter",
    "PerModel",
    "Slice",
    "Source",
    "Stream",
    "Term",
    "lookup",
    "merge_models",
    "merge_slices",
    "method",
]
