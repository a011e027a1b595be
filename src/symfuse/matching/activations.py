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
from symfuse.groups import Element, Group, Linear, Moments, Monomial, Part, PartMoments, Scaling
from symfuse.groups.assignment import assign_batch
from symfuse.groups.base import total
from symfuse.groups.scale import LIMIT
from symfuse.io import Checkpoint
from symfuse.matching.blocks import improve
from symfuse.matching.chosen import choose, steps_of
from symfuse.modules import live
from symfuse.spec import Instance, Spec
from symfuse.stats.activations import Batch, Heard, inverse_deviations, listen, moments_of, present, require_kind
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
        mask = present(batch)
        counts = torch.ones_like(ids).bool() if mask is None else mask.bool()
        return counts & ~torch.isin(ids, torch.tensor(sorted(without), dtype=ids.dtype))

    elements = match_activations(
        chosen.spec, live_anchor, live_source, batches, list(chosen.groups), chosen.groups, kind=kind,
        residual=residual, keep=keep if without else None,
    )  # fmt: skip
    options = {"scaling": scaling, "kind": kind, "residual": residual, "without": sorted(without)}
    options |= {"groups": dict(groups)} if groups else {}
    found = Alignment(chosen.spec, elements)
    return chosen.alignment(found, "activations", options, steps_of(chosen, found))


def _has_planes(spec: Spec, outer: Instance) -> bool:
    """Whether what is inside of an axis has elements for more than its indices, as rotary planes have."""
    inside = [batch for axis in spec.order if outer.axis in (batch := spec.batch_axes(axis))]
    return any(batch != (outer.axis,) for batch in inside)


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
    `moments_of`. keep: as in `listen`. An instance that is heard nowhere is left out; so is the order of heads with
    rotary positions, as pairs of them are not scored by their planes yet.
    """
    require_kind(kind)
    if residual not in RESIDUAL:
        raise OptionError(f"residual is {residual!r}; expected {', '.join(RESIDUAL)}")
    where = places(spec, anchor, [i for i in instances if not _has_planes(spec, i)])
    where |= {i: found[RESIDUAL[residual]] for i, found in where.items() if not i.index}
    wanted = list(dict.fromkeys(place for found in where.values() for place in found))
    full = {place for i, found in where.items() if groups[i].gram for place in found}
    heard = listen(spec, anchor, source, batches, wanted, keep=keep, gram=full)
    at = {i: _heard_of(i, found, heard) for i, found in where.items() if found}
    elements: dict[Instance, Element] = {}
    for instance in sorted(at, key=lambda i: -spec.order.index(i.axis)):  # axes that others are inside of first
        inner = [i for i in at if instance.axis in spec.batch_axes(i.axis) and i.index == instance.index]
        if inner:
            elements |= _heads(spec, instance, inner, at, groups, kind)
        elif instance not in elements:
            elements[instance] = _best(spec, instance, at[instance], groups[instance], kind)
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


def _best(spec: Spec, instance: Instance, heard: Mapping[Place, Heard], group: Group, kind: str) -> Element:
    """The best element: where units are rescaled the permutation or rotation first, and then the anchor's deviations.

    What activations gain by a scale takes no account of the weights that read the unit.
    """
    moments = _alike(spec, instance, heard, group, kind)
    if not _rescales(group):
        return improve(group, moments)[0]
    if isinstance(group, Scaling):  # what is left of it without scales is the identity
        xy = next(iter(moments.values())).xy
        found: Element = group.identity(xy.shape[-1], tuple(xy.shape[:-2]))
    else:
        found = improve(group.without_scaling(), moments)[0]
    scale = _scale(found, moments_of(spec, instance, heard, group, "covariance"))
    tensors = dict(found.tensors())
    return found.rebuild(tensors | {"scale": scale * tensors.get("scale", 1)})  # which has signs


def _rescales(group: Group) -> bool:
    """Whether its elements are scales after a permutation or rotation."""
    if isinstance(group.identity(1, ()), Linear):
        return False
    return isinstance(group, Scaling) or group.without_scaling() != group


def _alike(
    spec: Spec, instance: Instance, heard: Mapping[Place, Heard], group: Group, kind: str, *, pairs: bool = False
) -> PartMoments:
    """The moments from which an element follows up to its scales; pairs: as in `moments_of`.

    A rotation with a scale turns the anchor's way what has its norm. So queries and keys have the same say, however
    either model shares the norm of its scores among them, and so has each head.
    """
    moments = moments_of(spec, instance, heard, group, kind, pairs=pairs)
    if isinstance(group.identity(1, ()), Monomial) or not _rescales(group):
        return moments
    out: dict[Part, Moments] = {}
    for part, m in moments.items():
        sx, sy = (inverse_deviations(norms.mean(-1, keepdim=True)) for norms in (m.x_norms, m.y_norms))
        out[part] = Moments(m.xy * (sx * sy)[..., None], m.x_norms * sx.square(), m.y_norms * sy.square())
    return out


def _scale(found: Element, moments: PartMoments) -> Tensor:
    """The ratio of deviations of each unit, or of all that a rotation mixes: the geometric mean over the parts, of
    which the dual one goes the other way, and 1 where there is none in which both change.

    Swapping the models inverts it. The slope of least squares is that times the correlation: of units that are alike
    and not the same it is too small, in both directions.
    """
    logs = []
    for part, m in moments.items():
        if part == "plain":  # does not feel scales
            continue
        by_unit = isinstance(found, Monomial)
        x, y = (m.x_norms, found.forget().act(m.y_norms, -1)) if by_unit else (m.x_norms.sum(-1), m.y_norms.sum(-1))
        ratio = inverse_deviations(y) / inverse_deviations(x)
        logs.append(-ratio.log() if part == "dual" else ratio.log())
    each = torch.stack(logs)
    mean = each.where(each.isfinite(), 0).sum(0) / each.isfinite().sum(0).clamp_min(1)
    return mean.exp().clamp(1 / LIMIT, LIMIT)


def _heads(
    spec: Spec,
    outer: Instance,
    inner: Collection[Instance],
    at: Mapping[Instance, Mapping[Place, Heard]],
    groups: Mapping[Instance, Group],
    kind: str,
) -> dict[Instance, Element]:
    """The permutation of heads, and the inner elements of the pairs, indexed as the source is before it is permuted."""
    alike = {i: _alike(spec, i, at[i], groups[i], kind, pairs=True) for i in inner}
    index = assign_batch(torch.stack([groups[i].reach(total(pairs).xy) for i, pairs in alike.items()]).sum(0))
    back = torch.argsort(index)
    elements: dict[Instance, Element] = {outer: Monomial(index)}
    for instance in inner:
        paired = {place: _reordered(spec, instance, place, found, index) for place, found in at[instance].items()}
        best = _best(spec, instance, paired, groups[instance], kind)
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
