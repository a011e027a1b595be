"""Declarations of a user's own: a family as data (of a file, or of Python), for models of one size, while this process
runs. No code is in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import nn

from symfuse.architectures.base import ARCHITECTURES, Architecture, Family, Head
from symfuse.arguments import require_type
from symfuse.errors import LayoutError, VerificationError
from symfuse.groups import GROUPS, Group
from symfuse.io.live import CONFIGS, untied
from symfuse.messages import suggestion
from symfuse.spec import Axis, Shift

_TEXTS: Any = dict[str, str]
_LISTS: Any = dict[str, list[str]]
_PARTS: Mapping[type, Mapping[str, Any]] = {
    Axis: {"size": int, "group": str | None, "per": list[str]},
    Head: {"classes": list[str], "tensors": _TEXTS},
    Shift: {"bias": str, "axis": str, "weight": str | None, "into": str | None},
}
# What a declaration may say: the fields of `Family`, and of what it is.
KINDS: Mapping[str, Any] = {
    "family": str, "config": dict[str, object], "unverified": str, "axes": dict[str, object], "tensors": _TEXTS,
    "prefix": str, "optional": dict[str, _TEXTS], "heads": dict[str, object], "tied": _TEXTS, "absent": _TEXTS,
    "buffers": list[str], "legacy": _TEXTS, "shifts": list[object], "outputs": _TEXTS, "reads": _LISTS, "norm": str,
    "scales": _TEXTS, "stacks": _LISTS, "gauges": _TEXTS, "predictors": _TEXTS,
}  # fmt: skip
# The configs of modules that carry none, by their class and their shapes.
_configs: dict[tuple[Any, ...], dict[str, Any]] = {}


def family_of(data: Mapping[str, Any], where: str) -> Family:
    """The declaration that data say. LayoutError names the key that is not as it must be, VerificationError a draft
    that was not verified."""
    for key, value in data.items():
        if key not in KINDS:
            raise LayoutError(
                f"{where}: unknown key {key!r}{suggestion(str(key), KINDS)}; known are {', '.join(KINDS)}"
            )
        require_type(value, KINDS[key], f"{where}: {key}")
    for key in ("family", "axes", "tensors"):
        if key not in data:
            raise LayoutError(f"{where}: {key!r} is missing, which every declaration has")
    if "unverified" in data:
        raise VerificationError(
            f"{where}: this draft of {data['family']} is UNVERIFIED ({data['unverified']}); check it, then remove the "
            "line `unverified`"
        )
    lists = ((key, {name: tuple(names) for name, names in data.get(key, {}).items()}) for key in ("reads", "stacks"))
    parts = {
        "axes": {name: _part(Axis, one, f"{where}: axes.{name}") for name, one in data["axes"].items()},
        "heads": {name: _part(Head, one, f"{where}: heads.{name}") for name, one in data.get("heads", {}).items()},
        "shifts": tuple(_part(Shift, one, f"{where}: shifts") for one in data.get("shifts", [])),
        "buffers": tuple(data.get("buffers", ())),
    }
    known = {one.name for one in fields(Family)}
    return Family(**{key: value for key, value in data.items() if key in known} | parts | dict(lists))


def _part(kind: type, data: Any, where: str) -> Any:
    """An axis (a size alone is one too), a head or a shift."""
    known = _PARTS[kind]
    data = {"size": data} if kind is Axis and isinstance(data, int) else data
    require_type(data, dict[str, object], where)
    if unknown := [key for key in data if key not in known]:
        raise LayoutError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    require_type({"group": None, "per": [], "weight": None, "into": None, **data}, dict(known), where)
    if kind is Axis:
        group = data.get("group")
        if data["size"] < 1 or (group is not None and group not in GROUPS):
            raise LayoutError(f"{where} is of size {data['size']} with group {group!r}; known are {', '.join(GROUPS)}")
        data = {**data, "group": GROUPS.get(str(group))}
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def as_data(value: Any) -> Any:
    """A declaration as `family_of` reads it: without fields that are empty, or have their defaults."""
    if isinstance(value, Group):
        return value.name
    if is_dataclass(value):
        named = {one.name: (getattr(value, one.name), one.default) for one in fields(value)}
        return {key: as_data(one) for key, (one, usual) in named.items() if one != usual and one not in ({}, (), "")}
    if isinstance(value, Mapping):
        return {key: as_data(one) for key, one in value.items()}
    return [as_data(one) for one in value] if isinstance(value, tuple) else value


def own(
    name: str, family: Family, *, tied: bool = True, build: Callable[[Mapping[str, Any]], nn.Module] | None = None
) -> Architecture:
    """The architecture of a declaration for one size. tied: whether its head is the embedding where a config does not
    say. build: as `Architecture` has it."""
    bare = replace(family, tied={})
    return Architecture(name, lambda c: family if c.tied == bool(family.tied) else bare, build, tied=tied)


def builder(module: nn.Module) -> Callable[[Mapping[str, Any]], nn.Module]:
    """Makes copies of a module, for weights of another model: with a head of its own if the config unties it."""

    def build(config: Mapping[str, Any]) -> nn.Module:
        made = copy.deepcopy(module)
        return untied(made) if config.get("tie_word_embeddings") is False else made

    return build


def register(name: str, family: Family, module: nn.Module | None, config: Mapping[str, Any]) -> None:
    """Register a declaration under its `model_type`. module: one of the class, which is copied; then all modules of
    this class and these shapes have that config, unless they carry one."""
    build = None if module is None else builder(copy.deepcopy(module))
    ARCHITECTURES[name] = own(name, family, tied=bool(family.tied), build=build)
    if module is not None:
        _configs[_kind(module)] = {**config, "model_type": name}


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((name, tuple(tensor.shape)) for name, tensor in module.state_dict().items())


CONFIGS.append(lambda module: _configs.get(_kind(module)))
