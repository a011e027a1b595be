"""Declarations of a user's own: a family as data (of a file, or of Python), for models of one size, while this process
runs. No code is in them."""

from __future__ import annotations

import copy
import fnmatch
import graphlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

from torch import nn

from symfuse.architectures.base import ARCHITECTURES, Architecture, Family, Head
from symfuse.arguments import require_type
from symfuse.errors import LayoutError, VerificationError
from symfuse.groups import GROUPS, Group
from symfuse.io.live import CONFIGS, shapes_of, untied
from symfuse.messages import some, suggestion
from symfuse.spec import Axis, NormKind, Shift, parse

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
        if data.get(key, "") == "":
            raise LayoutError(
                f"{where}: {key!r} is {'empty' if key in data else 'missing'}, which every declaration has"
            )
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
    if data.get("norm", "layer") not in get_args(NormKind):
        raise LayoutError(f"{where}: norm is {data['norm']!r}; known are {', '.join(get_args(NormKind))}")
    known = {one.name for one in fields(Family)}
    family = Family(**{key: value for key, value in data.items() if key in known} | parts | dict(lists))
    _require_names(family, _axes_by_name(family, where), where)
    return family


_NAME = re.compile(r"(?:[^{}]|{[A-Za-z_]\w*})*")  # of a tensor, with axes in braces


def _layouts(family: Family) -> Iterator[tuple[str, str, str]]:
    """The key, the name and the layout of each tensor and output."""
    groups = {"tensors": family.tensors, "predictors": family.predictors, "outputs": family.outputs}
    groups |= {f"optional.{label}": tensors for label, tensors in family.optional.items()}
    groups |= {f"heads.{label}.tensors": head.tensors for label, head in family.heads.items()}
    return ((key, name, text) for key, tensors in groups.items() for name, text in tensors.items())


def _axes_by_name(family: Family, where: str) -> dict[str, set[str]]:
    """The axes of each tensor and output, as written there, by `_unnumbered` name. LayoutError for a layout that does
    not parse, for an axis that is not declared, and for one that is nowhere."""
    out: dict[str, set[str]] = defaultdict(set)
    used: set[str] = set()
    for key, name, text in _layouts(family):
        at = f"{where}: {key}: {name}"
        if not _NAME.fullmatch(name):
            raise LayoutError(f"{at}: in braces only an axis may stand, such as {{l}}")
        try:
            atoms = [atom for atom in parse(text).atoms if not atom.name.isdigit()] if text else []
        except LayoutError as error:
            raise LayoutError(f"{at}: {error}") from None
        axes = {*re.findall(r"{(\w+)}", name), *(atom.name for atom in atoms)}
        _require(axes, family.axes, f"{at}: axis", "is not declared; declared are")
        if key in ("tensors", "predictors") and text and any(fnmatch.fnmatchcase(name, one) for one in family.buffers):
            raise LayoutError(f"{at} is one of the `buffers`, which are dropped; it has a layout here")
        out[_unnumbered(name)] |= {*map(str, atoms)}
        used |= axes
    pers = {name: axis.per for name, axis in family.axes.items()}
    for name, per in pers.items():
        _require(per, family.axes, f"{where}: axes.{name}: per", "is not declared; declared are")
    try:
        graphlib.TopologicalSorter(pers).prepare()
    except graphlib.CycleError as error:
        raise LayoutError(f"{where}: axes: {' per '.join(error.args[1])} is a circle") from None
    if unused := family.axes.keys() - used - {*sum(pers.values(), ())}:
        raise LayoutError(f"{where}: axes: {some(sorted(unused))} is in no name and in no layout; correct or remove it")
    return out


def _require_names(family: Family, axes: Mapping[str, set[str]], where: str) -> None:
    """LayoutError for a tensor that a rule names and the declaration does not have."""
    pairs = [(key, one) for key in ("reads", "scales", "gauges", "stacks") for one in getattr(family, key)]
    pairs += [("reads", reader) for readers in family.reads.values() for reader in readers]
    pairs += [(key, one) for key in ("scales", "gauges", "tied", "absent") for one in getattr(family, key).values()]
    pairs += [("shifts", one) for rule in family.shifts for one in (rule.bias, rule.weight, rule.into) if one]
    for key, name in pairs:
        _require([_unnumbered(name)], axes, f"{where}: {key}: {name}:", "is no tensor that has a layout; such are")
    for rule in family.shifts:
        of = axes[_unnumbered(rule.bias)]
        _require([rule.axis], of, f"{where}: shifts: {rule.bias}: axis", "is not in its layout; there are")
    for template in (name for pieces in family.stacks.values() for name in pieces):
        keys = re.findall(r"{(\w+)}", template) if _NAME.fullmatch(template) else [template]
        _require(keys, family.axes, f"{where}: stacks: {template}: axis", "is not declared; declared are")


def _require(names: Collection[str], known: Collection[str], at: str, what: str) -> None:
    for name in names:
        if name not in known:
            raise LayoutError(f"{at} {name!r} {what} {some(sorted(known), 12)}{suggestion(name, known)}")


def _unnumbered(name: str) -> str:
    """A name with a sign in the place of each number, and of each axis."""
    return re.sub(r"{\w+}|(?<![^.])\d+(?![^.])", "#", name)


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
            groups = ", ".join(GROUPS)
            raise LayoutError(
                f"{where} is of size {data['size']} with group {group!r}; known are {groups}; sizes from 1"
            )
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
    return type(module), tuple(shapes_of(module).items())


CONFIGS.append(lambda module: _configs.get(_kind(module)))
