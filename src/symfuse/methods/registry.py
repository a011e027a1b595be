"""The registry of merge methods, which importing `symfuse.methods` fills from the files of that package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from symfuse.errors import OptionError
from symfuse.merging.base import Learn, Merge, Method
from symfuse.messages import suggestion

METHODS: dict[str, Method] = {}


def method(
    name: str, *, learn: Learn | None = None, data_required: bool = True, **fields: Any
) -> Callable[[Merge], Merge]:
    """Register a merge method under the name that recipes and the command line use. fields: others of `Method`."""

    def register(function: Merge) -> Merge:
        required = data_required and learn is not None
        METHODS[name] = Method(name, function=function, learn=learn, data_required=required, **fields)
        return function

    return register


def lookup(name: str) -> Method:
    """The method of that name; OptionError, with the nearest names, if there is none."""
    if name not in METHODS:
        near = suggestion(name, METHODS)
        raise OptionError(f"merge method {name!r} is not known{near}; choose from {', '.join(sorted(METHODS))}")
    return METHODS[name]
