"""Matching from activations: units that do the same on the same inputs belong together (Li et al. 2016; Verma &
Elbayad 2024), with every solver that matching from weights has.

The activations of a model are its own whatever is done to the other axes, so one pass is enough: heads first, each pair
scored at its best inner elements, then what is inside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from symfuse.groups import Element, Group, Monomial
from symfuse.groups.assignment import assign_batch
from symfuse.spec import Instance, Spec
from symfuse.stats.activations import Batch, Heard, Kind, Place, listen, moments_of, pairs_of, places


def match_activations(
    spec: Spec,
    anchor: nn.Module,
    source: nn.Module,
    batches: Iterable[Batch],
    instances: Sequence[Instance],
    groups: Mapping[Instance, Group],
    *,
    kind: Kind = "pearson",
    residual: str = "all",
    keep: Callable[[Batch], Tensor] | None = None,
) -> dict[Instance, Element]:
    """The best element of each axis instance for the activations of two live modules on the same batches.

    residual: which places of an axis that all layers share count: the "first", the "last", or "all". kind: as in
    `moments_of`. keep: as in `listen`. An instance that is heard nowhere is left out.
    """
    where = {
        i: _chosen(places(spec, anchor, i), residual) if not i.index else places(spec, anchor, i) for i in instances
    }
    wanted = list(dict.fromkeys(place for found in where.values() for place in found))
    full = {place for i, found in where.items() if groups[i].gram for place in found}
    heard = listen(spec, anchor, source, batches, wanted, keep=keep, gram=full)
    at = {i: {place: heard[place] for place in found} for i, found in where.items() if found}
    elements: dict[Instance, Element] = {}
    for instance in sorted(at, key=lambda i: -spec.order.index(i.axis)):  # axes that others are inside of first
        inner = [i for i in at if instance.axis in spec.batch_axes(i.axis) and i.index == instance.index]
        if inner:
            elements |= _heads(spec, instance, inner, at, groups)
        elif instance not in elements:
            elements[instance] = groups[instance].best(moments_of(spec, instance, at[instance], groups[instance], kind))
    return {instance: element for instance, element in elements.items() if not element.is_identity()}


def _chosen(found: Sequence[Place], which: str) -> Sequence[Place]:
    return {"first": found[:1], "last": found[-1:], "all": found}[which]


def _heads(
    spec: Spec,
    outer: Instance,
    inner: Collection[Instance],
    at: Mapping[Instance, Mapping[Place, Heard]],
    groups: Mapping[Instance, Group],
) -> dict[Instance, Element]:
    """The permutation of heads, and the inner elements of the pairs, indexed as the source is before it is permuted."""
    score = torch.stack([groups[i].reach(pairs_of(spec, i, at[i])) for i in inner]).sum(0)
    index = assign_batch(score)
    back = torch.argsort(index)
    elements: dict[Instance, Element] = {outer: Monomial(index)}
    for instance in inner:
        paired = {place: _reordered(spec, instance, place, found, index) for place, found in at[instance].items()}
        best = groups[instance].best(moments_of(spec, instance, paired, groups[instance]))
        elements[instance] = best.rebuild({key: tensor[back] for key, tensor in best.tensors().items()})
    return elements


def _reordered(spec: Spec, inner: Instance, place: Place, heard: Heard, index: Tensor) -> Heard:
    """What would be heard if the heads of the source stood in the order of the anchor's."""
    (axis,) = spec.batch_axes(inner.axis)
    width = place.layout.shape(spec.sizes)[0]
    order = torch.arange(width)
    moved = torch.empty_like(order)
    for segment, target in zip(
        place.layout.segments(order, spec.sizes), place.layout.segments(moved, spec.sizes), strict=True
    ):
        names = [atom.name for atom in segment.atoms]
        target.view.copy_(segment.view.index_select(names.index(axis), index) if axis in names else segment.view)
    yy = heard.yy[moved][:, moved] if heard.yy.ndim == 2 else heard.yy[moved]
    return Heard(heard.xy[:, moved], heard.xx, yy)
