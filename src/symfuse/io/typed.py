"""Whether data that were read from JSON have the types that they should."""

from __future__ import annotations

import json
from types import UnionType
from typing import Any, get_args, get_origin

from symfuse.errors import LayoutError

_WORDS = {str: "a text", int: "a whole number", type(None): "null", list: "a list", tuple: "a list", dict: "an object"}


def require_type(value: object, kind: Any, key: str) -> None:
    """LayoutError that names the key, unless a value is of a kind: str, int, object (anything), kinds joined by |,
    list[kind], tuple[kind, …] (a list of as many), dict[str, kind], or {key: kind, …}, an object with those keys."""
    if kind is object or (get_origin(kind) is UnionType and type(value) in get_args(kind)):
        return
    origin = dict if isinstance(kind, dict) else get_origin(kind) or kind
    args = get_args(kind)
    if type(value) is not (list if origin is tuple else origin):
        words = " or ".join(_WORDS[one] for one in (args if origin is UnionType else (origin,)))
        raise LayoutError(f"{key!r} is {_short(value)}, expected {words}")
    if isinstance(kind, dict) and isinstance(value, dict):
        for name, inner in kind.items():
            if name not in value:
                raise LayoutError(f"{key!r} has no {name!r}")
            require_type(value[name], inner, f"{key}.{name}")
    elif isinstance(value, dict):
        for name, one in value.items():
            require_type(one, args[1], f"{key}.{name}")
    elif isinstance(value, list):
        if origin is tuple and len(value) != len(args):
            raise LayoutError(f"{key!r} is {_short(value)}, expected a list of {len(args)}")
        for number, one in enumerate(value):
            require_type(one, args[number] if origin is tuple else args[0], f"{key}[{number}]")


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:39] + "…"
