"""Patterns for names of modules, as an adapter's config has them: regular expressions of whoever wrote the file.

`re` tries one way after the other, and takes time that doubles with every letter for some; here all ways are followed
at once, as sets of positions (Thompson 1968), so that the time is bounded by the lengths of pattern and name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

MOST_GROUPS = 50
_AMBIGUOUS = re.compile(r"[*+?{|(\\^$\[]")  # without these there is only one way
_CATEGORIES: Mapping[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda sign: sign.isalnum() or sign == "_",
}


@cache
def module_pattern(pattern: str) -> Callable[[str], bool]:
    """What peft makes of a name or a regular expression: whether it matches the end of a module's dotted name.

    ValueError if it is not valid, or needs more than one reading of the name (look-around, back-references).
    """
    whole = rf"(.*\.)?({pattern})$"
    try:
        compiled = re.compile(whole)
        if not _AMBIGUOUS.search(pattern):
            return lambda name: compiled.match(name) is not None
        if pattern.count("(") > MOST_GROUPS:
            raise ValueError(f"it has more than {MOST_GROUPS} groups")
        nodes = import_module("re._parser").parse(whole)
        _ends(nodes, frozenset({0}), "")  # all of it is understood
    except (re.error, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} is not valid: {error}") from error
    return lambda name: bool(_ends(nodes, frozenset({0}), name))


def _ends(nodes: Any, at: frozenset[int], text: str) -> frozenset[int]:
    """Where a sequence of nodes may end in a text, of those that begin at one of some positions."""
    for kind, argument in nodes:
        at = _after(str(kind), argument, at, text)
    return at


def _after(kind: str, argument: Any, at: frozenset[int], text: str) -> frozenset[int]:
    if kind == "SUBPATTERN" and not argument[1] and not argument[2]:  # no flags of its own
        return _ends(argument[3], at, text)
    if kind == "BRANCH":
        return frozenset().union(*(_ends(one, at, text) for one in argument[1]))
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, inner = argument
        return _repeated(least, most, inner, at, text)
    if kind == "AT" and str(argument) in ("AT_BEGINNING", "AT_END"):
        return at & {0 if str(argument) == "AT_BEGINNING" else len(text)}
    fits = _sign(kind, argument)
    return frozenset(i + 1 for i in at if i < len(text) and fits(text[i]))


def _repeated(least: int, most: int, nodes: Any, at: frozenset[int], text: str) -> frozenset[int]:
    found = frozenset[int]() if least else at
    count = 0
    while count < most:
        before, at, count = at, _ends(nodes, at, text), count + 1
        if count < least and at and at != before:
            continue
        if at <= found:
            break
        found |= at
    return found


def _sign(kind: str, argument: Any) -> Callable[[str], bool]:
    """Which single characters a node stands for."""
    if kind in ("LITERAL", "NOT_LITERAL"):
        return lambda sign: (ord(sign) == argument) == (kind == "LITERAL")
    if kind == "ANY":
        return lambda sign: sign != "\n"
    if kind == "RANGE":
        return lambda sign: argument[0] <= ord(sign) <= argument[1]
    if kind == "CATEGORY":
        *no, name = str(argument).removeprefix("CATEGORY_").split("_")
        return lambda sign: _CATEGORIES[name](sign) != bool(no)
    if kind == "IN":
        negated = str(argument[0][0]) == "NEGATE"
        parts = [_sign(str(one), value) for one, value in argument[negated:]]
        return lambda sign: any(fits(sign) for fits in parts) != negated
    raise ValueError(f"it has a part of kind {kind.lower()}, expected no look-around, back-references or flags")
