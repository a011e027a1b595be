"""The merge methods: one file each, which registers it. METHODS, lookup: all of them, whatever is imported first."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from symfuse.merging.base import METHODS, lookup
from symfuse.methods.collect import collect
from symfuse.methods.data import Inputs, Learned
from symfuse.methods.learn import Found, learn

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Found", "Inputs", "Learned", "collect", "learn", "lookup"]
