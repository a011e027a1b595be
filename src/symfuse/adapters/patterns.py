"""Patterns for names of modules, as an adapter's config has them: regular expressions of whoever wrote the file.

For some, such as `(a+)+x`, `re` takes time that doubles with every letter of the name. These are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

LETTERS = 64  # the length of a name, about, and so the ways in which one unbounded repeat can match
MOST_WAYS = LETTERS**4  # that `re` may have to try
_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT")


@cache
def module_pattern(pattern: str) -> Callable[[str], bool]:
    """What peft makes of a name or a regular expression: whether it matches the end of a module's dotted name.

    ValueError if it is not valid, has look-around, back-references or flags, or could take very long to match.
    """
    try:
        compiled = re.compile(rf"(.*\.)?({pattern})$")
        if _ways(import_module("re._parser").parse(pattern)) > MOST_WAYS:
            raise ValueError("it has too many repeats and alternatives, so that it could take very long to match")
    except (re.error, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} is not valid: {error}") from error
    return lambda name: compiled.match(name) is not None


def _ways(nodes: Any) -> int:
    """In how many ways a sequence of nodes can match the letters of a name, at most."""
    return math.prod(_ways_of(str(kind), argument) for kind, argument in nodes)


def _ways_of(kind: str, argument: Any) -> int:
    if kind in _SINGLE:
        return 1
    if kind == "SUBPATTERN" and not argument[1] and not argument[2]:  # no flags of its own
        return _ways(argument[3])
    if kind == "BRANCH":
        return sum(map(_ways, argument[1]))
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, inner = argument
        ways = _ways(inner)
        if most > 1 and ways > 1:
            raise ValueError("it repeats what has repeats or alternatives itself, which could take very long to match")
        repeats: int = max(1, min(most - least + 1, LETTERS))
        return repeats * ways
    raise ValueError(f"it has a part of kind {kind.lower()}, expected no look-around, back-references or flags")
