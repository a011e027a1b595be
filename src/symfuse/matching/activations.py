"""Matching from activations: units with similar activations on the same inputs are matched (Li et al. 2016; Verma &
Elbayad 2024), by the same solvers as in matching from weights.

The activations on one axis do not depend on the elements of the other axes, so one pass is enough: first the heads,
where each pair is scored at its best inner elements, then the axes inside of heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from symfuse.alignment import Alignment
from symfuse.arguments import checked
from symfuse.device import CPU
from symfuse.errors import OptionError
from symfuse.groups import Element, Group, Monomial, Permutation
from symfuse.groups.assignment import assign_batch
from symfuse.groups.base import total
from symfuse.io import Checkpoint
from symfuse.matching.problem import problem_of, steps_of
from symfuse.matching.transport import POLICIES, along_the_stream
from symfuse.matching.units import alike, best
from symfuse.model import TRANSPORT, Model
from symfuse.modules import live
from symfuse.spec import Instance, Spec
from symfuse.stats.activations import Batch, Covariances, present, record, require_kind
from symfuse.stats.taps import Tap, taps

# Which taps are used, of an axis that all layers share.
RESIDUAL = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}


@checked
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
    device: str = CPU,
) -> Alignment:
    """The alignment that moves `source` towards `anchor`, from the activations of both on the same batches.

    axes, layers, groups, variants, frame: as in `match_models`. scaling: also rescale each unit by the ratio of its
    standard deviations; off by default, as it increases the distance of independent models (docs/matching.md). kind:
    how units are compared, see `moments_of`. residual: see `match_activations`; or one of POLICIES: each point of the
    stream has its own map, under the variants "separate-residual" and "transport". without: ids of tokens to ignore,
    such as special ones; padding is always ignored. build: makes the module, for models that `transformers` does not
    have. device: on which both models run, and the solvers.
    Biases are not translated, as activations do not determine their translations.
    """
    variants = [*variants, "separate-residual", TRANSPORT] if residual in POLICIES else variants
    source, anchor = (model.on(device) for model in (source, anchor))
    problem = problem_of(source, anchor, axes, layers, scaling=scaling, groups=groups, variants=variants, frame=frame)
    live_anchor, live_source = (
        (build or _live)(model.checkpoint.on(CPU)).to(model.checkpoint.device)
        for model in (problem.anchor, problem.source)
    )
    if "decoder_input_ids" in inspect.signature(live_anchor.forward).parameters:
        raise OptionError(
            f"{anchor.name} is an encoder with a decoder, whose inputs are of different lengths: their activations are "
            "not matched yet; match from weights (--from weights)"
        )

    def keep(batch: Batch) -> Tensor:
        if "input_ids" not in batch:
            raise OptionError(
                f"there are no tokens to leave out: the batches have no input_ids, but {', '.join(batch)}"
            )
        ids = batch["input_ids"]
        mask = present(batch)
        counts = torch.ones_like(ids).bool() if mask is None else mask.bool()
        return counts & ~torch.isin(ids, torch.tensor(sorted(without), dtype=ids.dtype))

    again = list(batches) if residual in POLICIES else []
    elements = match_activations(
        problem.spec, live_anchor, live_source, again or batches, list(problem.groups), problem.groups, kind=kind,
        residual="all" if residual in POLICIES else residual, keep=keep if without else None,
    )  # fmt: skip
    if residual in POLICIES:
        elements |= along_the_stream(problem, live_anchor, live_source, again, elements, residual, kind)
    options = {"scaling": scaling, "kind": kind, "residual": residual, "without": sorted(without)}
    options |= {"groups": dict(groups)} if groups else {}
    alignment = Alignment(problem.spec, elements)
    return problem.alignment(alignment, "activations", options, steps_of(problem, alignment))


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
    """The best element of each axis instance for the activations of two live modules on the same batches: solved where
    the anchor is, and kept on the processor.

    residual: which taps are used of an axis that all layers share: the "first", the "last", or "all". kind: as in
    `moments_of`. keep: as in `record`. An instance without a tap is left out.
    """
    require_kind(kind)
    if residual not in RESIDUAL:
        raise OptionError(f"residual is {residual!r}; expected {', '.join([*RESIDUAL, *POLICIES])}")
    where = taps(spec, anchor, instances)
    where |= {i: instance_taps[RESIDUAL[residual]] for i, instance_taps in where.items() if not i.index}
    where = {i: instance_taps for i, instance_taps in where.items() if instance_taps}
    inside = _inside(where, groups)
    later = {outer: {i.axis for i in inner if i in inside} for outer, inner in inside.items()}
    apart = {
        outer: taps(spec, anchor, inner, without=later[outer]) if later[outer] else {i: where[i] for i in inner}
        for outer, inner in inside.items()
    }
    of = [(i, instance_taps) for each in (where, *apart.values()) for i, instance_taps in each.items() if instance_taps]
    wanted = list(dict.fromkeys(tap for _, instance_taps in of for tap in instance_taps))
    full = {tap for i, instance_taps in of if groups[i].gram for tap in instance_taps}
    recorded = record(spec, anchor, source, batches, wanted, keep=keep, gram=full)
    for instance, instance_taps in of:
        _require_recorded(instance, instance_taps, recorded)

    def at(where: Mapping[Instance, Collection[Tap]]) -> dict[Instance, dict[Tap, Covariances]]:
        return {
            i: {tap: recorded[tap] for tap in instance_taps if tap in recorded} for i, instance_taps in where.items()
        }

    device = next((p.device for p in anchor.parameters()), torch.device(CPU))
    orders: dict[Instance, Tensor] = {}
    for outer in sorted(inside, key=lambda i: -spec.order.index(i.axis)):  # axes that others are inside of first
        orders[outer] = _order(spec, outer, at(apart[outer]), groups, kind, later[outer], device)
        recorded = {tap: _reordered(spec, outer, tap, one, orders[outer]) for tap, one in recorded.items()}
    elements: dict[Instance, Element] = {}
    for instance, there in at(where).items():
        ordered = Monomial(orders[instance]) if instance in orders else None
        element = ordered or best(spec, instance, there, groups[instance], kind, device)
        elements[instance] = _as_source(spec, instance, element, orders)
    return {instance: element for instance, element in elements.items() if not element.is_identity()}


def _require_recorded(instance: Instance, expected_taps: Collection[Tap], recorded: Mapping[Tap, Covariances]) -> None:
    """OptionError if nothing was recorded at any tap of an axis instance."""
    if not any(tap in recorded for tap in expected_taps):
        raise OptionError(
            f"no activations of {instance} at {', '.join(map(str, expected_taps))}: no batch makes the models call "
            "that module, or they call its .forward, past its hooks; leave that axis out (axes=), or give build= a "
            "module that calls its parts as module(x)"
        )


def _inside(at: Mapping[Instance, Collection[Tap]], groups: Mapping[Instance, Group]) -> dict[Instance, list[Instance]]:
    """Each axis that is reordered and has others inside of it (heads; the query heads that share a key) → those inside:
    axes at the same taps, whose units vary faster."""
    inside: dict[Instance, list[Instance]] = {}
    for outer in at:
        for inner, where in at.items() if isinstance(groups[outer], Permutation) else ():
            parts = ([atom.name for atom in part] for tap in where for part in tap.layout.parts)
            if inner.index[: len(outer.index)] == outer.index and any(_is_in(inner, outer, part) for part in parts):
                inside.setdefault(outer, []).append(inner)
    return inside


def _is_in(inner: Instance, outer: Instance, part: Sequence[str]) -> bool:
    return {inner.axis, outer.axis} <= {*part} and part.index(outer.axis) < part.index(inner.axis)


def _order(
    spec: Spec,
    outer: Instance,
    inner: Mapping[Instance, Mapping[Tap, Covariances]],
    groups: Mapping[Instance, Group],
    kind: str,
    later: Collection[str],
    device: torch.device,
) -> Tensor:
    """The permutation of an outer axis, as an index. The score of a pair of its units is the objective at the best
    inner elements.

    later: axes inside of it whose order is not known yet; parts that have them are ignored. device: of the solver.
    """
    worth, pairs = list[Tensor](), len(spec.batch_axes(outer.axis)) + 2
    for instance, recorded in inner.items():
        moments = alike(spec, instance, recorded, groups[instance], kind, pairs=outer.axis, without=later)
        if moments:
            each = groups[instance].reach(total(moments).xy.to(device)).cpu()
            worth.append(each.flatten(pairs).sum(-1) if each.ndim > pairs else each)
    return assign_batch(torch.stack(worth).sum(0))


def _reordered(spec: Spec, outer: Instance, tap: Tap, recorded: Covariances, index: Tensor) -> Covariances:
    """The moments of one tap as if the source's units on an outer axis had been in that order."""
    here = spec.instance(outer.axis, spec.tensors[tap.weight].index)
    if here != outer or outer.axis not in tap.layout.names:
        return recorded
    axes = (*spec.batch_axes(outer.axis), outer.axis)
    order = torch.arange(tap.layout.shape(spec.sizes)[0])
    permuted = order.clone()
    segments = (tap.layout.segments(numbers, spec.sizes) for numbers in (order, permuted))
    for segment, target in zip(*segments, strict=True):
        names = [atom.name for atom in segment.atoms]
        if outer.axis in names:
            by_place = index.permute(sorted(range(len(axes)), key=lambda i: names.index(axes[i])))
            shape = [spec.sizes[name] if name in axes else 1 for name in names]
            target.view.copy_(segment.view.take_along_dim(by_place.reshape(shape), names.index(outer.axis)))
    yy = recorded.yy[permuted][:, permuted] if recorded.yy.ndim == 2 else recorded.yy[permuted]
    return Covariances(recorded.xy[:, permuted], recorded.xx, yy)


def _as_source(spec: Spec, instance: Instance, element: Element, orders: Mapping[Instance, Tensor]) -> Element:
    """An element that is indexed by outer units in the anchor's order, re-indexed by those in the source's order."""
    batch = spec.batch_axes(instance.axis)
    for outer, index in reversed([*orders.items()]):  # heads, then the blocks in which these heads have that order
        if outer.axis in batch and instance.index[: len(outer.index)] == outer.index:
            dim, back = batch.index(outer.axis), torch.argsort(index)
            moved = {
                key: t.take_along_dim(back.reshape(*back.shape, *[1] * (t.ndim - back.ndim)), dim)
                for key, t in element.tensors().items()
            }
            element = element.rebuild(moved)
    return element
