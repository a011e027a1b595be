"""Matching from activations: units that do the same on the same inputs belong together (Li et al. 2016; Verma &
Elbayad 2024), with every solver that matching from weights has.

The activations of a model are its own whatever is done to the other axes, so one pass is enough: heads first, each pair
scored at its best inner elements, then what is inside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from symfuse.alignment import Alignment
from symfuse.architectures import Model
from symfuse.errors import OptionError
from symfuse.groups import Element, Group, Monomial
from symfuse.groups.assignment import assign_batch
from symfuse.groups.base import total
from symfuse.groups.scale import LIMIT
from symfuse.io import Checkpoint
from symfuse.matching.blocks import improve
from symfuse.matching.chosen import choose, steps_of
from symfuse.modules import live
from symfuse.spec import Instance, Spec
from symfuse.stats.activations import Batch, Heard, Place, listen, moments_of, pairs_of, places, require_kind

# Which of the places where an axis that all layers share is heard count.
RESIDUAL = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}


def match_by_activations(
    source: Model,
    anchor: Model,
    batches: Iterable[Batch],
    *,
    axes: str | tuple[str, ...] = "all",
    layers: str | int | tuple[int, ...] | None = None,
    scaling: bool = True,
    frame: Sequence[str] | None = None,
    kind: str = "pearson",
    residual: str = "all",
    without: Collection[int] = (),
    build: Callable[[Checkpoint], nn.Module] | None = None,
) -> Alignment:
    """The alignment that moves `source` towards `anchor`, from what both do on the same batches.

    axes, layers, scaling, frame: as in `match_models`. kind: how units are compared, see `moments_of`. residual: see
    `match_activations`. without: ids of tokens that do not count, such as special ones; padding never does. build:
    makes the module, for models that `transformers` does not have. Biases are not translated: activations do not say
    how.
    """
    chosen = choose(source, anchor, axes, layers, scaling=scaling, frame=frame)
    live_anchor, live_source = ((build or _live)(model.checkpoint) for model in (chosen.anchor, chosen.source))

    def keep(batch: Batch) -> Tensor:
        if "input_ids" not in batch:
            raise OptionError(
                f"there are no tokens to leave out: the batches have no input_ids, but {', '.join(batch)}"
            )
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        return mask & ~torch.isin(ids, torch.tensor(sorted(without), dtype=ids.dtype))

    elements = match_activations(
        chosen.spec, live_anchor, live_source, batches, list(chosen.groups), chosen.groups, kind=kind,
        residual=residual, keep=keep if without else None,
    )  # fmt: skip
    options = {"scaling": scaling, "kind": kind, "residual": residual, "without": sorted(without)}
    found = Alignment(chosen.spec, elements)
    return chosen.alignment(found, "activations", options, steps_of(chosen, found))


def _live(checkpoint: Checkpoint) -> nn.Module:
    return live(checkpoint, torch.float32)


def match_activations(
    spec: Spec,
    anchor: nn.Module,
    source: nn.Module,
    batches: Iterable[Batch],
    instances: Sequence[Instance],
    groups: Mapping[Instance, Group],
    *,
    kind: str = "pearson",
    residual: str = "all",
    keep: Callable[[Batch], Tensor] | None = None,
) -> dict[Instance, Element]:
    """The best element of each axis instance for the activations of two live modules on the same batches.

    residual: which places of an axis that all layers share count: the "first", the "last", or "all". kind: as in
    `moments_of`. keep: as in `listen`. An instance that is heard nowhere is left out.
    """
    require_kind(kind)
    if residual not in RESIDUAL:
        raise OptionError(f"residual is {residual!r}; expected {', '.join(RESIDUAL)}")
    where = {i: places(spec, anchor, i) for i in instances}
    where |= {i: found[RESIDUAL[residual]] for i, found in where.items() if not i.index}
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
            elements[instance] = _alone(spec, instance, at[instance], groups[instance], kind)
    return {instance: element for instance, element in elements.items() if not element.is_identity()}


def _alone(spec: Spec, instance: Instance, heard: Mapping[Place, Heard], group: Group, kind: str) -> Element:
    """The best element of an axis that none is inside of.

    Units that may be rescaled are permuted first, and then given the deviations of the anchor's: correlations know
    nothing of scales, and what activations gain by one takes no account of the weights that read the unit.
    """
    if not isinstance(group.identity(1, ()), Monomial) or (reordering := group.without_scaling()) == group:
        return improve(group, moments_of(spec, instance, heard, group, kind))[0]
    index = improve(reordering, moments_of(spec, instance, heard, reordering, kind))[0].tensors()["index"]
    units = total(moments_of(spec, instance, heard, reordering, "covariance"))
    ratio = units.x_norms / torch.take_along_dim(units.y_norms, index, -1)
    scale = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0).sqrt()
    return Monomial(index, scale.clamp(1 / LIMIT, LIMIT))


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
