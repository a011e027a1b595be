"""The input of a matching from weights or activations: two models in one frame, and the group of each axis. And how
much an alignment changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from symfuse import __version__
from symfuse.alignment import Alignment
from symfuse.errors import OptionError, SymmetryError
from symfuse.groups import Conformal, Element, Group, Permutation, Sinkhorn, sinkhorn, subgroups
from symfuse.matching.auto import SAME_BASIS, auto_axes
from symfuse.matching.axes import (
    ALIASES,
    NO_GROUP,
    axes_of,
    choose_axes,
    choose_groups,
    choose_layers,
    limited,
    may_transport,
)
from symfuse.model import (
    TRANSPORT,
    Model,
    require_floating,
    require_same_shape,
    require_unread,
    require_variants,
    vary,
    with_split,
)
from symfuse.rewriting import canonical
from symfuse.rewriting.ties import tied_heads
from symfuse.spec import Instance, Spec, layer_of

# The rewrites after which a pre-norm residual stream may be rotated; names and shapes stay.
ROTATABLE = ("untie", "fold_norms", "centre", "drop_gauges")


def rotatable(spec: Spec) -> tuple[str, ...]:
    """ROTATABLE, after folding LayerScales if the model has any."""
    return ("fold_scales", *ROTATABLE) if spec.scales else ROTATABLE


@dataclass(frozen=True)
class Problem:
    """source, anchor: in the frame, with declarations changed by the variants. groups: instance to match → its group.
    lineage: of both models before any rewrite, for the provenance. auto: why these axes and this frame, if the caller
    named none."""

    source: Model
    anchor: Model
    frame: tuple[str, ...]
    axes: tuple[str, ...]
    layers: frozenset[int]
    groups: Mapping[Instance, Group]
    lineage: Mapping[str, Any]
    variants: tuple[str, ...] = ()
    auto: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> Spec:
        return self.source.spec

    @property
    def hard(self) -> Mapping[Instance, Group]:
        """The groups, with permutations instead of transport."""
        return {i: Permutation() if isinstance(group, Sinkhorn) else group for i, group in self.groups.items()}

    def alignment(
        self,
        alignment: Alignment,
        origin: str,
        options: Mapping[str, Any],
        steps: Sequence[Mapping[str, Any]],
        **more: Any,
    ) -> Alignment:
        """The alignment with frame, variants and provenance added. origin: "weights" or "activations"."""
        options = {"axes": list(self.axes), "layers": sorted(self.layers), **self.auto, **options}
        options |= {"variants": list(self.variants)} if self.variants else {}
        about = {"from": origin, "options": options, "steps": steps, **more}
        provenance = {"symfuse": __version__, **self.lineage, **about}
        return replace(alignment, provenance=provenance, frame=self.frame, variants=self.variants)


def problem_of(
    source: Model,
    anchor: Model,
    axes: str | tuple[str, ...],
    layers: str | int | tuple[int, ...] | None,
    *,
    scaling: bool,
    frame: Sequence[str] | None,
    groups: Mapping[str, str] | None = None,
    variants: Sequence[str] = (),
    one_pass: bool = False,
) -> Problem:
    """Both models in the frame, by default in the `usual` one.

    groups: word → the name of the group to match its axes with, instead of the usual one. These axes are matched even
    if `axes` does not name them, or not matched if the name is "none". scaling: False for subgroups that keep norms,
    for axes that are not in `groups`. variants: change the declarations (`symfuse.model.vary`), which is inexact. A
    group `sinkhorn` implies the variant TRANSPORT, which in turn implies that group for axes that are not in `groups`.
    Raises IncompatibleError, OptionError, SpecError or CheckpointError if the source cannot be aligned with the anchor.
    """
    require_same_shape(alike_tied(source, anchor))
    for model in (source, anchor):
        require_floating(model)
    axes, frame, auto = usual([source, anchor], axes, groups, frame, variants)
    lineage = {"source": source.checkpoint.lineage(), "anchor": anchor.checkpoint.lineage()}
    soft = TRANSPORT in variants
    variants = require_variants([*variants, *(TRANSPORT for name in (groups or {}).values() if sinkhorn(name))])
    source, anchor = (canonical(model, frame) for model in (source, anchor))
    require_same_shape([source, anchor])  # again: without a frame, their ties may differ
    asked, axes_to_match = select(source.spec, axes, groups)  # untying may split one stream in two
    require_unread(source.checkpoint, source.spec, axes_to_match)
    source, anchor = (replace(model, spec=vary(model.spec, variants)) for model in (source, anchor))
    spec = source.spec
    kept = choose_layers(layers, spec.depth)
    in_kept = {None, *kept}  # axes outside of layers are always matched
    if gone := sorted(asked.keys() - {*with_split(asked, spec).values()}):
        raise OptionError(f"groups: {', '.join(gone)}: no such axis under {', '.join(variants)}; leave one of them out")
    split = with_split(axes_to_match, spec)
    axes_to_match = tuple(split)
    group_of = {
        axis: _group(spec, axis, asked.get(of), scaling, one_pass, soft)
        for axis, of in split.items()
        if axis in spec.order
    }
    by_instance = {
        instance: group_of[instance.axis]
        for instance in spec.movable
        if instance.axis in axes_to_match and layer_of(spec.index_of(instance)) in in_kept
    }
    return Problem(source, anchor, tuple(frame), axes_to_match, kept, by_instance, lineage, variants, auto)


def alike_tied(source: Model, anchor: Model) -> tuple[Model, Model]:
    """Both models, untied if only one of them is tied. (In encoder-decoders more than the head may be tied.)"""
    if bool(tied_heads(source)) == bool(tied_heads(anchor)):
        return source, anchor
    return canonical(source, ("untie",)), canonical(anchor, ("untie",))


def usual(
    models: Sequence[Model],
    axes: str | tuple[str, ...],
    groups: Mapping[str, str] | None = None,
    frame: Sequence[str] | None = None,
    variants: Sequence[str] = (),
) -> tuple[str | tuple[str, ...], tuple[str, ...], dict[str, Any]]:
    """The axes and the frame for matching all of these models with each other, and the reasons for those that the
    caller did not name. The axes are those of `auto_axes`. The frame is `rotatable` if the residual stream of pre-norm
    models is matched by a larger group than acts on it without a frame, and all models can be rewritten so; else it is
    empty."""
    axes, least = auto_axes(axes, models)
    why: dict[str, Any] = {} if least is None else {"auto": {"cosine": least, "same_basis": least >= SAME_BASIS}}
    if frame is not None:
        return axes, tuple(frame), why
    spec = models[0].spec
    asked, axes_to_match = select(spec, axes, groups)
    if not spec.reads or not _is_turned(spec, axes_to_match, asked, "sinkhorn" if TRANSPORT in variants else ""):
        return axes, (), why
    reasons = [reason for model in models if (reason := _not_rotatable(model)) is not None]
    if reasons and (named := axes_of("residual", asked)):
        raise OptionError(f"groups: {named[0]} by {asked[named[0]]}: {reasons[0]}")
    return axes, () if reasons else rotatable(spec), why | ({"not_rotated": reasons[0]} if reasons else {})


def select(
    spec: Spec, axes: str | tuple[str, ...], groups: Mapping[str, str] | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Axis → name of the group that the caller wants; and the axes to match: those that are named, or have such a
    group. OptionError if the model has none of them, or all have the group "none"."""
    asked = choose_groups(groups or {}, spec)
    named = dict.fromkeys([*choose_axes(axes, spec), *asked])
    movable = {instance.axis for instance in spec.movable}
    if not movable.intersection(named):
        words = axes if isinstance(axes, str) else ", ".join(axes)
        has = [axis for axis in axes_of("all", spec.axes) if axis in movable]
        other = f"{', '.join(sorted(movable))}, whose names end in no word that is matched (docs/declare.md)"
        raise OptionError(
            f"axes {words}: this {spec.family} has no such axis, so that there is nothing to match; it has "
            f"{', '.join(has) or other}"
        )
    axes_to_match = tuple(axis for axis in named if asked.get(axis) != NO_GROUP)
    if not movable.intersection(axes_to_match):
        raise OptionError("groups: every axis is taken out, so that there is nothing to match")
    return asked, axes_to_match


def _not_rotatable(model: Model) -> str | None:
    """Why the residual stream cannot be rotated in place; None if it can."""
    try:
        canonical(model, rotatable(model.spec))
    except SymmetryError as error:
        return str(error)
    return None


def _is_turned(spec: Spec, axes_to_match: Collection[str], asked: Mapping[str, str], default: str) -> bool:
    """Whether a residual stream that norms read is matched by a group that may act on it only in the rotatable frame.
    default: the name of the group of axes that are not in `asked`."""
    pre_norm = {axis for gain in spec.reads for axis in spec.tensors[gain].layout.names}
    groups = {axis: spec.axes[axis].group for axis in axes_of("residual", axes_to_match) if axis in pre_norm}
    for axis, group in groups.items():
        name = asked.get(axis, default)
        if group is not None and sinkhorn(name) is None and ALIASES.get(name, name) not in subgroups(group):
            return True
    return False


def _group(spec: Spec, axis: str, name: str | None, scaling: bool, one_pass: bool, soft: bool) -> Group:
    declared = spec.axes[axis].group
    assert declared is not None
    if name is None and soft and may_transport(axis, declared, spec.axes[axis].size):
        name = "sinkhorn"
    if name is None:
        usual = declared.usual()
        name = (usual if scaling else usual.without_scaling()).name
    group = limited(axis, declared, spec.axes[axis].size, name)
    return replace(group, one_pass=True) if one_pass and isinstance(group, Conformal) else group


def steps_of(problem: Problem, alignment: Alignment) -> list[dict[str, Any]]:
    """For each instance the squared distance over the tensors that it acts on, before and after the whole alignment."""
    spec, instances = problem.spec, list(problem.groups)
    touched = dict.fromkeys(name for instance in instances for name in spec.movable[instance])
    gaps = _gaps(problem, alignment, [name for name in touched if spec.shares(name, problem.anchor.spec)])
    steps = []
    for instance in instances:
        parts = [gaps[name] for name in spec.movable[instance] if name in gaps]
        group, element = problem.groups[instance], alignment.elements.get(instance)
        steps.append(
            {
                "instance": str(instance),
                "group": group.label,
                "before": sum(before for before, _ in parts),
                "after": sum(after for _, after in parts),
                "units": math.prod(spec.batch(instance.axis)),
                "moved": 0 if element is None else _not_identity(element, group),
            }
        )
    return steps


def _gaps(problem: Problem, alignment: Alignment, names: Collection[str]) -> dict[str, tuple[float, float]]:
    """The squared distance of each tensor to the anchor's, before and after the alignment."""
    aligned = Model(alignment.on(problem.source), problem.spec)
    gaps = {}
    for name in names:
        x = problem.anchor.read(name).double()
        before, after = ((x - model.read(name)).square().sum() for model in (problem.source, aligned))
        gaps[name] = (float(before), float(after))
    return gaps


def _not_identity(element: Element, group: Group) -> int:
    """How many elements of the batch are not the identity."""
    unit = group.identity(element.size, element.batch).tensors()
    differ = torch.zeros(element.batch, dtype=torch.bool)
    for key, tensor in element.tensors().items():
        same = tensor == unit.get(key, torch.ones_like(tensor))
        differ |= ~same.reshape(*element.batch, -1).all(-1)
    return int(differ.sum())
