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
from symfuse.groups import Conformal, Element, Group, Monomial, PartMoments, Similarity
from symfuse.groups.assignment import assign_batch
from symfuse.groups.base import total
from symfuse.groups.orthogonal import polar
from symfuse.groups.scale import LIMIT
from symfuse.io import Checkpoint
from symfuse.matching.blocks import improve
from symfuse.matching.chosen import choose, steps_of
from symfuse.modules import live
from symfuse.spec import Instance, Spec
from symfuse.stats.activations import Batch, Heard, listen, moments_of, pairs_of, require_kind
from symfuse.stats.places import Place, places

# Which of the places where an axis that all layers share is heard count.
RESIDUAL = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}


def match_by_activations(
    source: Model,
    anchor: Model,
    batches: Iterable[Batch],
    *,
    axes: str | tuple[str, ...] = "auto",
    layers: str | int | tuple[int, ...] | None = None,
    scaling: bool = False,
    groups: Mapping[str, str] | None = None,
    variants: Sequence[str] = (),
    frame: Sequence[str] | None = None,
    kind: str = "pearson",
    residual: str = "all",
    without: Collection[int] = (),
    build: Callable[[Checkpoint], nn.Module] | None = None,
) -> Alignment:
    """The alignment that moves `source` towards `anchor`, from what both do on the same batches.

    axes, layers, groups, variants, frame: as in `match_models`. scaling: also rescale, by the ratio of deviations; not
    by default, as between independent models it lengthens the distance (docs/matching.md). kind: how units are
    compared, see `moments_of`. residual: see `match_activations`. without: ids of tokens that do not count, such as
    special ones; padding never does. build: makes the module, for models that `transformers` does not have. Biases are
    not translated: activations do not say how.
    """
    chosen = choose(source, anchor, axes, layers, scaling=scaling, groups=groups, variants=variants, frame=frame)
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
    options |= {"groups": dict(groups)} if groups else {}
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
    where = places(spec, anchor, instances)
    where |= {i: found[RESIDUAL[residual]] for i, found in where.items() if not i.index}
    wanted = list(dict.fromkeys(place for found in where.values() for place in found))
    full = {place for i, found in where.items() if groups[i].gram for place in found}
    heard = listen(spec, anchor, source, batches, wanted, keep=keep, gram=full)
    at = {i: _heard_of(i, found, heard) for i, found in where.items() if found}
    elements: dict[Instance, Element] = {}
    for instance in sorted(at, key=lambda i: -spec.order.index(i.axis)):  # axes that others are inside of first
        inner = [i for i in at if instance.axis in spec.batch_axes(i.axis) and i.index == instance.index]
        if inner:
            elements |= _heads(spec, instance, inner, at, groups)
        elif instance not in elements:
            elements[instance] = _alone(spec, instance, at[instance], groups[instance], kind)
    return {instance: element for instance, element in elements.items() if not element.is_identity()}


def _heard_of(instance: Instance, found: Collection[Place], heard: Mapping[Place, Heard]) -> dict[Place, Heard]:
    """What is heard of an axis instance; OptionError if all of its places are silent."""
    at = {place: heard[place] for place in found if place in heard}
    if not at:
        raise OptionError(
            f"nothing is heard of {instance} at {', '.join(map(str, found))}: no batch makes the models call that "
            "module, or they call its .forward, past its hooks; leave that axis out (axes=), or give build= a module "
            "that calls its parts as module(x)"
        )
    return at


def _alone(spec: Spec, instance: Instance, heard: Mapping[Place, Heard], group: Group, kind: str) -> Element:
    """The best element of an axis that none is inside of.

    Units that may be rescaled are permuted first, and then given the deviations of the anchor's: correlations know
    nothing of scales, and what activations gain by one takes no account of the weights that read the unit.
    """
    if not isinstance(group.identity(1, ()), Monomial) or (reordering := group.without_scaling()) == group:
        return _best(group, moments_of(spec, instance, heard, group, kind))
    found = _best(reordering, moments_of(spec, instance, heard, reordering, kind))
    index = found.tensors()["index"]
    units = total(moments_of(spec, instance, heard, reordering, "covariance"))
    return Monomial(index, _scale(units.x_norms, torch.take_along_dim(units.y_norms, index, -1)))


def _best(group: Group, moments: PartMoments) -> Element:
    """The best element; of rotations with a scale the one that turns the anchor's way what has its norms.

    Queries and keys have the same say, however either model shares the norm of its scores among them.
    """
    if not isinstance(group, Conformal):
        return improve(group, moments)[0]
    scales, grams = [], []
    for part, m in moments.items():
        x, y = m.x_norms.sum(-1), m.y_norms.sum(-1)
        scales.append(_scale(y, x) if part == "dual" else _scale(x, y))
        grams.append(m.xy / (x * y).sqrt().clamp_min(torch.finfo(x.dtype).tiny)[..., None, None])
    return Similarity(polar(torch.stack(grams).sum(0)), torch.stack(scales).log().mean(0).exp())


def _scale(x: Tensor, y: Tensor) -> Tensor:
    """The ratio of deviations, from variances; 1 where one of them never changes.

    Swapping the models inverts it. The slope of least squares is that times the correlation: of units that are alike
    and not the same it is too small, in both directions.
    """
    ratio = x / y
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0).sqrt().clamp(1 / LIMIT, LIMIT)


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
        best = _best(groups[instance], moments_of(spec, instance, paired, groups[instance]))
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
