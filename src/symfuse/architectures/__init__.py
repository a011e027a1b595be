"""Every family that symfuse knows, in short files of near ones: importing the package registers them all."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from symfuse.architectures.base import ARCHITECTURES, Architecture, Config, Family, Head, architecture, lookup
from symfuse.architectures.binding import resolve

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["ARCHITECTURES", "Architecture", "Config", "Family", "Head", "architecture", "lookup", "resolve"]
