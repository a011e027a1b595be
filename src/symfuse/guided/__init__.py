"""Merges that look at data: one file per method, registered when it is imported. METHODS, lookup: all, with them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from symfuse.guided.base import Inputs, Learned
from symfuse.guided.collect import collect
from symfuse.guided.run import Found, Pending, learn
from symfuse.merging import METHODS, lookup

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Found", "Inputs", "Learned", "Pending", "collect", "learn", "lookup"]
