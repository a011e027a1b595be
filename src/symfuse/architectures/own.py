"""Declarations of a user's own: a family as data (of a file, or of Python), for models of one size, while this process
runs. No code is in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from torch import nn

from symfuse.architectures.base import ARCHITECTURES, Architecture, Family, Head
from symfuse.arguments import require_type
from symfuse.errors import LayoutError, VerificationError
from symfuse.groups import GROUPS
from symfuse.io.live import CONFIGS, untied
from symfuse.messages import suggestion
from symfuse.spec import Axis, Shift

_TEXTS = dict[str, str]
# What a declaration may say: the fields of `Family`, and of what it is.
KINDS: Mapping[str, Any] = {
    "family": str, "config": dict[str, object], "unverified": str, "axes": dict[str, object], "tensors": _TEXTS,
    "prefix": str, "optional": dict[str, _TEXTS], "heads": dict[str, object], "tied": _TEXTS, "absent": _TEXTS,
    "buffers": list[str], "legacy": _TEXTS, "shifts": list[list[str | None]], "outputs": _TEXTS,
    "reads": dict[str, list[str]], "norm": str, "scales": _TEXTS, "stacks": dict[str, list[str]], "gauges": _TEXTS,
    "predictors": _TEXTS,
}  # fmt: skip
_AXIS: Mapping[str, Any] = {"size": int, "group": str | None, "per": list[str]}
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
    known = {one.name for one in fields(Family)}
    of: dict[str, Any] = {key: value for key, value in data.items() if key in known}
    of["axes"] = {name: _axis(one, f"{where}: axes.{name}") for name, one in data["axes"].items()}
    of["heads"] = {name: _head(one, f"{where}: heads.{name}") for name, one in data.get("heads", {}).items()}
    of["shifts"] = tuple(Shift(*(str(part) for part in one if part)) for one in data.get("shifts", []))
    for key in ("reads", "stacks"):
        of[key] = {name: tuple(names) for name, names in data.get(key, {}).items()}
    return Family(**of | {"buffers": tuple(data.get("buffers", ()))})


def _axis(data: Any, where: str) -> Axis:
    """An axis, as a size alone, or with `group` and `per`."""
    data = {"group": None, "per": [], **({"size": data} if isinstance(data, int) else data)}
    require_type(data, _AXIS, where)
    group = data["group"]
    if unknown := [key for key in data if key not in _AXIS]:
        raise LayoutError(f"{where}: unknown key {unknown[0]!r}; an axis has {', '.join(_AXIS)}")
    if data["size"] < 1 or (group is not None and group not in GROUPS):
        raise LayoutError(f"{where} is of size {data['size']} with group {group!r}; known are {', '.join(GROUPS)}")
    return Axis(data["size"], None if group is None else GROUPS[group], tuple(data["per"]))


def _head(data: Any, where: str) -> Head:
    require_type(data, {"classes": list[str], "tensors": _TEXTS}, where)
    return Head(tuple(data["classes"]), data["tensors"])


def as_data(family: Family) -> dict[str, Any]:
    """The fields of a declaration that are not their defaults, as `family_of` reads them."""

    def plain(value: Any) -> Any:
        if isinstance(value, Axis):
            group = {"group": value.group.name} if value.group else {}
            per = {"per": list(value.per)} if value.per else {}
            return {"size": value.size, **group, **per} if group else value.size
        if isinstance(value, Shift):
            return [part for part in (value.bias, value.axis, value.weight, value.into) if part]
        if isinstance(value, Head):
            return {"classes": list(value.classes), "tensors": dict(value.tensors)}
        if isinstance(value, Mapping):
            return {key: plain(one) for key, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, tuple) else value

    def usual(one: Any) -> Any:
        return one.default_factory() if one.default is MISSING and one.default_factory is not MISSING else one.default

    values = {one.name: (getattr(family, one.name), usual(one)) for one in fields(Family)}
    return {name: plain(value) for name, (value, default) in values.items() if value != default}


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
    copied = None if module is None else copy.deepcopy(module)
    build = None if copied is None else builder(copied)
    ARCHITECTURES[name] = own(name, family, tied=bool(family.tied), build=build)
    if module is not None:
        _configs[_kind(module)] = {**config, "model_type": name}


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((name, tuple(tensor.shape)) for name, tensor in module.state_dict().items())


CONFIGS.append(lambda module: _configs.get(_kind(module)))
