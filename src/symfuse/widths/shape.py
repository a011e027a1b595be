"""The shape that a model gets from another one of its family and depth: its config with the sizes of that one, and its
declaration in these sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from symfuse.architectures import lookup, resolve
from symfuse.architectures.base import Config
from symfuse.errors import IncompatibleError, SpecError
from symfuse.messages import some
from symfuse.model import Model
from symfuse.model.config import OF_HEADS
from symfuse.model.reasons import MEANING, reason
from symfuse.rewriting import untie
from symfuse.rewriting.ties import tied_heads
from symfuse.spec import Declared, Spec, anatomy, parse

# Names of fields contain these if they are sizes, even if only a class reads them (SigLIP's projection_size).
SIZES = ("heads", "size", "dim")


@dataclass(frozen=True)
class Shape:
    """A model, untied if its stream changes its size; and the declaration and the config that it gets."""

    model: Model
    spec: Spec
    config: Mapping[str, Any]

    @property
    def changed(self) -> list[str]:
        """The axes of its tensors whose size changes."""
        ours, theirs = self.model.spec.sizes, self.spec.sizes
        return [axis for axis in used(self.spec) if ours[axis] != theirs[axis]]


def shape_of(model: Model, like: Model) -> Shape:
    """The shape of `like` for this model. IncompatibleError, with the reason, if the model cannot have it: another
    family, depth or vocabulary, or another size of an axis without a group."""
    pair = f"{model.name} and {like.name}"
    if model.spec.family != like.spec.family:
        raise IncompatibleError(
            f"{pair}: one is a {model.spec.family}, the other a {like.spec.family}; only models of one family can have "
            "each other's shape"
        )
    if not model.declared:
        raise IncompatibleError(f"{pair}: symfuse has no declaration for {model.spec.family!r}, and so knows no axes")
    _require_depth(model.spec, like.spec, pair)
    shape = _shape(model, like, pair)
    if tied_heads(model) and any(anatomy(axis) in ("residual", "embedding") for axis in shape.changed):
        shape = _shape(untie(model), like, pair)  # what writes is copied, what reads is divided
    for axis in shape.changed:
        ours, theirs = shape.model.spec.axes[axis], shape.spec.axes[axis]
        if ours.group is None or anatomy(axis) == "e":
            raise IncompatibleError(f"{pair}: {_refusal(axis, shape.model.spec, ours.size, theirs.size)}")
    for axis in used(shape.spec):
        there = like.spec.axes.get(axis)
        if there is not None and anatomy(axis) != "labels" and there.size != shape.spec.axes[axis].size:
            raise IncompatibleError(
                f"{pair}: axis {axis!r} would have {shape.spec.axes[axis].size} units, and has {there.size} there; "
                "config.json does not say the sizes of both alike"
            )
    return shape


def used(spec: Spec) -> list[str]:
    """The axes that tensors have, and those that index them."""
    layouts = {name for declared in spec.tensors.values() for name in declared.layout.names}
    return [axis for axis in spec.axes if axis in layouts or axis in spec.index_axes]


def _require_depth(ours: Spec, theirs: Spec, pair: str) -> None:
    for axis in sorted(ours.index_axes & theirs.axes.keys()):
        one, other = ours.axes[axis].size, theirs.axes[axis].size
        if one != other and anatomy(axis) == "l":
            raise IncompatibleError(
                f"{pair}: the numbers of layers differ ({axis}): {one} and {other}; there is no exact map between "
                "models of different depth; a recipe can take as many layers of each (`slices`, `layer_range`)"
            )
        if one != other:
            raise IncompatibleError(f"{pair}: {_refusal(axis, ours, one, other)}")


def _shape(model: Model, like: Model, pair: str) -> Shape:
    config = _with_sizes(model, like)
    try:
        resolved = resolve(config, [*model.checkpoint], model.name)
    except SpecError as error:
        raise IncompatibleError(f"{pair}: with the sizes of the second, the first cannot be: {error}") from error
    own = resolve(model.checkpoint.config, [*model.checkpoint], model.name)
    if differ := sorted(own.tensors.keys() ^ resolved.tensors.keys()) or _differing(own, resolved):
        raise IncompatibleError(
            f"{pair}: in the sizes of the second the first would not have the same tensors with the same axes "
            f"({some(differ)}), as where a projection is left out, or positions turn whole heads; there is no exact map"
        )
    for name in resolved.tensors:
        atoms = own.tensors[name].layout.atoms
        moved = any(own.axes[atom.name].group for atom in atoms if atom.name in own.axes)
        if moved and [a.name for a in atoms] != [a.name for a in resolved.tensors[name].layout.atoms]:
            raise IncompatibleError(
                f"{pair}: {name} reads a size that no axis has, as of sines that the class makes; there is no exact map"
            )
    axes = {name: replace(axis, size=resolved.axes[name].size) for name, axis in model.spec.axes.items()}
    tensors = dict(model.spec.tensors)
    for name, declared in tensors.items():
        here = resolved.tensors[name].layout.shape(resolved.sizes)
        kept = declared.layout.shape({axis: a.size for axis, a in axes.items()})
        if here != kept:  # a size that no axis has: of a gain that is folded, of a table that nothing reads
            tensors[name] = Declared(parse(" ".join(map(str, here))), declared.index)
    return Shape(model, replace(model.spec, axes=axes, tensors=tensors), config)


def _differing(one: Spec, other: Spec) -> list[str]:
    """The tensors whose axes differ."""

    def words(spec: Spec, name: str) -> list[str]:
        return [str(atom) for atom in spec.tensors[name].layout.atoms if not atom.name.isdigit()]

    return [name for name in one.tensors if words(one, name) != words(other, name)]


def _with_sizes(model: Model, like: Model) -> dict[str, Any]:
    """The config of a model with those numbers of the other's from which a declaration takes its sizes, and numbers of
    heads that only classes read. Other settings, such as where values are clipped, stay."""
    config = dict(model.checkpoint.config)
    ours, theirs = (_numbers(one) for one in (model, like))
    others = [
        key
        for key, value in ours.items()
        if key in theirs and theirs[key] != value and key.rpartition(".")[2] not in OF_HEADS
    ]
    for key in others:
        config = _with(config, key, theirs[key])
    narrow, wide = dict(model.checkpoint.config), config
    before, after = _sizes(narrow, model), _sizes(wide, model)
    for key in others if after is not None else ():
        alone, without = _with(narrow, key, theirs[key]), _with(wide, key, ours[key])
        named = any(word in key.rpartition(".")[2] for word in SIZES)
        if not named and _sizes(alone, model) == before and _sizes(without, model) == after:
            config = _with(config, key, ours[key])  # no size follows from it
    return config


def _with(config: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of a config with another value of a field, which may be nested."""
    out = copy.deepcopy(dict(config))
    *objects, field = key.split(".")
    data = out
    for name in objects:
        data = data.setdefault(name, {})
    data[field] = value
    return out


def _sizes(config: Mapping[str, Any], model: Model) -> dict[str, Any] | None:
    """The sizes of all axes and tensors that a model would have under a config; None if it cannot have it."""
    try:
        spec = resolve(config, [*model.checkpoint], model.name)
    except SpecError:
        return None
    return {**spec.sizes, **{name: declared.layout.shape(spec.sizes) for name, declared in spec.tensors.items()}}


def _numbers(model: Model) -> dict[str, Any]:
    """The numbers of a config that its declaration reads, with their defaults."""
    c = Config(model.checkpoint.config, model.spec.family)
    lookup(model.checkpoint.config, model.name).declare(c)
    heads = {key: value for key, value in model.checkpoint.config.items() if "heads" in key}  # read by the class alone
    return {key: value for key, value in (heads | c.seen).items() if value is None or _is_number(value)}


def _is_number(value: object) -> bool:
    pair = isinstance(value, list) and all(map(_is_number, value))
    return pair or (isinstance(value, int | float) and not isinstance(value, bool))


def _refusal(axis: str, spec: Spec, one: int, other: int) -> str:
    word = anatomy(axis)
    what = f"axis {axis!r} ({MEANING[word]})" if word in MEANING else f"axis {axis!r}"
    if word == "f":
        why = "the frequencies of rotary positions follow from the size of a head, so that heads keep theirs"
    elif word == "e":
        why = "a router chooses some of its experts, and would choose copies of one in the place of others"
    else:
        why = reason(axis, spec.axes[axis])
    return f"{what} has {one} units in the first and {other} in the second; {why}: there is no exact map between them"


def parts_with(spec: Spec, axis: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each part of a tensor that has the axis: the tensor's name, and the atoms of the part."""
    for name, declared in spec.tensors.items():
        for part in declared.layout.parts:
            if any(atom.name == axis for atom in part):
                yield name, part
