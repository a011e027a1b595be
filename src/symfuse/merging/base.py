"""The registry of merge methods: a decorated function whose signature is its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

# A method sees one tensor of every model, in the working dtype, with one weight each, and returns the merged one.
Merge = Callable[[Sequence[Tensor], Sequence[float]], Tensor]


@dataclass(frozen=True)
class Method:
    name: str
    label: str
    paper: str
    function: Merge


METHODS: dict[str, Method] = {}


def method(name: str, *, label: str, paper: str) -> Callable[[Merge], Merge]:
    """Register a merge method under the name that recipes and the command line use."""

    def register(function: Merge) -> Merge:
        METHODS[name] = Method(name, label, paper, function)
        return function

    return register
