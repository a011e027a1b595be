"""The arguments of public functions, checked against their signatures before any work; and data read from JSON."""

from __future__ import annotations

import builtins
import functools
import inspect
import json
import numbers
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from symfuse.errors import LayoutError, OptionError

F = TypeVar("F", bound=Callable[..., Any])

# What classes are called in messages, by their names; others are named as they are.
WORDS = {
    "str": "a text", "int": "a whole number", "float": "a number", "bool": "True or False", "NoneType": "None",
    "PathLike": "a path", "Remote": "a URL", "Checkpoint": "a checkpoint (symfuse.open)", "Module": "a module",
    "Task": "a task (symfuse.task)",
    "Alignment": "an alignment (symfuse.match)", "Statistics": "statistics (symfuse.collect)", "Tensor": "a tensor",
    "dtype": "a dtype of torch", "Callable": "a function", "Mapping": "a mapping",
}  # fmt: skip
MODEL = {"str", "PathLike", "Checkpoint", "Module"}  # what stands for a model in the public verbs
_KINDS: Mapping[Any, type] = {int: numbers.Integral, float: numbers.Real}
_WORDS = {str: "a text", int: "a whole number", type(None): "null", list: "a list", tuple: "a list", dict: "an object"}


def checked(function: F) -> F:
    """The function, which raises OptionError for an option that it does not have, naming the nearest one, and for the
    first argument that is not what its annotation says. A text is no list, a switch no number."""
    return checked_with(lambda _names: "")(function)


def checked_with(elsewhere: Callable[[Sequence[str]], str]) -> Callable[[F], F]:
    """`checked`, with the words for options that are not the function's own, by their names, or "" for no words."""
    return lambda function: _checked(function, elsewhere)


def _checked(function: F, elsewhere: Callable[[Sequence[str]], str]) -> F:
    signature = inspect.signature(function)
    named = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
    options = [name for name in named if name not in ("self", "cls")]
    anything = len(named) < len(signature.parameters)
    # A second positional argument, as of a list that is not written as one, is refused after the first is looked at.
    by_place = sum(
        one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in signature.parameters.values()
    )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := [] if anything else [name for name in kwargs if name not in options]:
            from symfuse.messages import suggestion  # here, as io has checked functions itself

            if where := elsewhere(unknown):
                raise OptionError(f"{function.__name__}: {where}")
            near = suggestion(unknown[0], options)
            raise OptionError(f"{function.__name__} has no option {unknown[0]!r}{near}; it has {', '.join(options)}")
        for name, value in signature.bind_partial(*args[:by_place], **kwargs).arguments.items():
            hint = _hints(function).get(name, Any)
            if name in options and not _fits(value, hint):
                raise OptionError(f"{function.__name__}: {name} is {_kind_of(value)}; expected {_words(hint)}")
        signature.bind(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


class _Names(dict[str, Any]):
    """The names that annotations are read with: those that are only imported for type checking stand for anything."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Any


@functools.cache
def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    return get_type_hints(function, localns=_Names(getattr(function, "__globals__", {})))


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Sequence, Collection, Iterable, tuple):
        return _is_list(value, origin) and _all_fit(value, parts[0] if parts else Any)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(map(functools.partial(_fits, hint=parts[1]), value.values()))
    if origin is Callable:
        return callable(value)
    if origin is Any or not isinstance(origin, type):
        return True
    if getattr(origin, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(origin) if not name.startswith("_"))
    if isinstance(value, bool):
        return origin in (bool, object)
    return isinstance(value, _KINDS.get(origin, origin))


def _is_list(value: Any, kind: Any) -> bool:
    if isinstance(value, str | bytes | Mapping | os.PathLike):
        return False
    return hasattr(value, "__iter__") and (kind is Iterable or hasattr(value, "__len__"))


def _all_fit(values: Any, hint: Any) -> bool:
    """Of what is a list already: others may be read only once."""
    return not isinstance(values, list | tuple) or all(_fits(value, hint) for value in values)


def _kind_of(value: Any) -> str:
    if value is None or isinstance(value, str | int | float | os.PathLike):
        return f"{value!r:.60}"
    if isinstance(value, list | tuple) and len(value) < 4:
        return f"[{', '.join(map(_kind_of, value))}]"
    if isinstance(value, Mapping) and 0 < len(value) < 4:
        return f"{{{', '.join(f'{key!r}: {_kind_of(one)}' for key, one in value.items())}}}"
    return _a(type(value).__name__)


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        model = MODEL if {_name(part) for part in parts} >= MODEL else set()
        words = ["a model (a folder or hub id, a checkpoint or a module)"] if model else []
        words += dict.fromkeys(_words(part) for part in parts if _name(part) not in model)
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (Sequence, Collection, Iterable, tuple):
        return f"a list, each of it {_words(parts[0])}" if parts else "a list"
    if origin is Mapping and parts[1:] not in ((), (Any,), (object,)):
        return f"a mapping (each value {_words(parts[1])})"
    return WORDS.get("NoneType" if origin is None else _name(origin), _a(_name(origin)))


def _name(hint: Any) -> str:
    return str(getattr(get_origin(hint) or hint, "__name__", hint))


def _a(name: str) -> str:
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


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
