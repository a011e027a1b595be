"""The merge methods, one file each. METHODS has all of them by name, sorted."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from symfuse.methods.collect import collect
from symfuse.methods.data import Inputs, Learned
from symfuse.methods.learn import Fitted, learn
from symfuse.methods.registry import METHODS, lookup

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
for _name in sorted(METHODS):
    METHODS[_name] = METHODS.pop(_name)

__all__ = ["METHODS", "Fitted", "Inputs", "Learned", "collect", "learn", "lookup"]
