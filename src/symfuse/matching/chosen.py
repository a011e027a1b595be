"""What is to be matched, whatever the moments come from: two models in one frame, and the groups of their axes; and
what an alignment came to."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from symfuse import __version__
from symfuse.alignment import Alignment
from symfuse.architectures import Model, require_floating, require_same_shape
from symfuse.canonical import canonical
from symfuse.groups import Conformal, Element, Group
from symfuse.matching.axes import choose_axes, choose_layers
from symfuse.spec import Instance, Spec

# What makes a pre-norm residual stream rotatable, in place.
ROTATABLE = ("untie", "fold_norms", "centre", "drop_gauges")


@dataclass(frozen=True)
class Chosen:
    """source, anchor: in the frame. groups: each instance to match, with the group to use. lineage: of both models as
    they were given, for the provenance."""

    source: Model
    anchor: Model
    frame: tuple[str, ...]
    axes: tuple[str, ...]
    layers: frozenset[int]
    groups: Mapping[Instance, Group]
    lineage: Mapping[str, Any]

    @property
    def spec(self) -> Spec:
        return self.source.spec

    def alignment(
        self, found: Alignment, origin: str, options: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], **more: Any
    ) -> Alignment:
        """What was found, in the frame and with its provenance. origin: what the moments came from."""
        options = {"axes": list(self.axes), "layers": sorted(self.layers), **options}
        about = {"from": origin, "options": options, "steps": steps, **more}
        provenance = {"symfuse": __version__, **self.lineage, **about}
        return replace(found, provenance=provenance, frame=self.frame)


def choose(
    source: Model,
    anchor: Model,
    axes: str | tuple[str, ...],
    layers: str | int | tuple[int, ...] | None,
    *,
    scaling: bool,
    frame: Sequence[str] | None,
    one_pass: bool = False,
) -> Chosen:
    """Both models in the frame, by default ROTATABLE where the residual stream of a pre-norm model is matched, else as
    they are. Raises IncompatibleError, OptionError or CheckpointError unless one may be moved onto the other."""
    require_same_shape([source, anchor])
    for model in (source, anchor):
        require_floating(model)
    chosen = choose_axes(axes, source.spec)
    if frame is None:
        frame = ROTATABLE if "residual" in chosen and source.spec.reads else ()
    lineage = {"source": source.checkpoint.lineage(), "anchor": anchor.checkpoint.lineage()}
    source, anchor = (canonical(model, frame) for model in (source, anchor))
    spec = source.spec
    kept = choose_layers(layers, spec.axes["l"].size)
    groups = {
        instance: _group(spec, instance, scaling, one_pass)
        for instance in spec.movable
        if instance.axis in chosen and (not instance.index or instance.index[0] in kept)
    }
    return Chosen(source, anchor, tuple(frame), chosen, kept, groups, lineage)


def _group(spec: Spec, instance: Instance, scaling: bool, one_pass: bool) -> Group:
    group = spec.axes[instance.axis].group
    assert group is not None
    group = group if scaling else group.without_scaling()
    return replace(group, one_pass=True) if one_pass and isinstance(group, Conformal) else group


def steps_of(chosen: Chosen, found: Alignment) -> list[dict[str, Any]]:
    """What an alignment over axes that meet did to each of them: over the tensors that it touches, before and after all
    of it."""
    spec, instances = chosen.spec, list(chosen.groups)
    touched = dict.fromkeys(name for instance in instances for name in spec.movable[instance])
    gaps = _gaps(chosen, found, [name for name in touched if spec.shares(name, chosen.anchor.spec)])
    steps = []
    for instance in instances:
        parts = [gaps[name] for name in spec.movable[instance] if name in gaps]
        group, element = spec.axes[instance.axis].group, found.elements.get(instance)
        assert group is not None
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


def _gaps(chosen: Chosen, found: Alignment, names: Collection[str]) -> dict[str, tuple[float, float]]:
    """The squared distance of each tensor to the anchor's, before and after: once for all axes that touch it."""
    moved = Model(found.on(chosen.source), chosen.spec)
    gaps = {}
    for name in names:
        x = chosen.anchor.read(name).double()
        before, after = ((x - model.read(name)).square().sum() for model in (chosen.source, moved))
        gaps[name] = (float(before), float(after))
    return gaps


def _not_identity(element: Element, group: Group) -> int:
    """How many elements of a batch are not the identity."""
    unit = group.identity(element.size, element.batch).tensors()
    differ = torch.zeros(element.batch, dtype=torch.bool)
    for key, tensor in element.tensors().items():
        same = tensor == unit.get(key, torch.ones_like(tensor))
        differ |= ~same.reshape(*element.batch, -1).all(-1)
    return int(differ.sum())
