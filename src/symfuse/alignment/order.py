"""The canonical order of a model: on every axis the element that orders and orients units by invariants of the model
itself, so that models that differ only by elements of their group become equal.

An axis is solved once the other axes of enough of its tensors are: it begins with tensors that the fixed axes (tokens,
positions, pixels, classes) read or write. Permutations need not wait, since no invariant here depends on the order of
columns: units are ordered by their norms, planes and signs oriented by their largest entries, rotations by the
eigenvectors of Gram matrices, pairs of a head by the singular values of their circuit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from symfuse.alignment.alignment import Alignment
from symfuse.alignment.apply import acting, move, reindexed, void
from symfuse.groups import (
    Centred,
    Element,
    Group,
    Monomial,
    Orthogonal,
    Part,
    Permutation,
    Phase,
    PositiveMonomial,
    Rotary,
    Sign,
    Signed,
    SignedMonomial,
)
from symfuse.groups.monomial import identity_index
from symfuse.groups.orthogonal import signs_of
from symfuse.model import Model
from symfuse.rewriting import applied
from symfuse.rewriting.balance import SOLVERS
from symfuse.rewriting.computed import Read
from symfuse.spec import Instance, Occurrence, Shift, Spec, bias_of, layer_of

FRAME = ("untie", "fold_scales", "fold_norms", "centre", "drop_gauges")
TIES = 1e-11  # by which norms, eigenvalues or entries must differ, as a share of the largest
# A part of a tensor that has the axis: the name of the tensor, and where the axis is in it.
Place = tuple[str, Occurrence]


@dataclass(frozen=True)
class Order:
    """alignment: from the model to its canonical order. sizes: of each axis that is ordered by norms, the norms of its
    units, largest first [*b, n]. sure: how far each element is determined, as a share: 0 for units, eigenvalues or
    entries that tie. loose: axes that no fixed axis reaches."""

    alignment: Alignment
    sizes: Mapping[Instance, Tensor]
    sure: Mapping[Instance, float]
    loose: tuple[Instance, ...]


def canonical_order(model: Model, kept: Collection[str] = ()) -> Order:
    """The canonical order of all axes but those in `kept`. Biases that may have any value become zero, and weights lose
    what gauges may add."""
    spec = model.spec
    base = untranslated(model)

    @lru_cache(maxsize=8)
    def read(name: str) -> Tensor:
        return base.shift(name, model.read(name).double(), lambda other: model.read(other).double())

    found: dict[Instance, Element] = {}
    sizes: dict[Instance, Tensor] = {}
    sure: dict[Instance, float] = {}
    loose = []
    left = sorted((i for i in spec.movable if i.axis not in kept), key=lambda i: (spec.order.index(i.axis), i.index))
    while left:
        instance, places, anchored = _next(spec, left)
        left.remove(instance)
        if not anchored:
            loose.append(instance)
        if places:
            element, norms, margin = _solved(spec, instance, places, found, read)
            found[instance], sure[instance] = element, margin
            if norms is not None:
                sizes[instance] = norms
    sizes = {i: _moved_along(spec, i, norms, found) for i, norms in sizes.items()}
    return Order(Alignment(spec, found) @ base, sizes, sure, tuple(loose))


def canonical_frame(model: Model) -> tuple[Model, tuple[str, ...]]:
    """The model after those rewrites of FRAME that it allows, and the names of those that changed it."""
    return applied(model, FRAME, skip=True)


def by_size(model: Model, kept: Collection[str] = ()) -> Alignment:
    """The permutations alone of the canonical order: units by their norms, the largest first."""
    order = canonical_order(model, kept)
    elements = {i: order.alignment.elements[i].forget() for i in order.sizes}
    return Alignment(model.spec, elements)


def untranslated(model: Model) -> Alignment:
    """The gauges that take from readers of norms what they may have any amount of, and then the translations that make
    biases zero that may have any value."""
    first = without_gauges(model)
    read: Read = lambda name: model.read(name).double()  # noqa: E731
    return without_free_biases(model.spec, lambda name: first.shift(name, read(name), read)) @ first


def without_gauges(model: Model) -> Alignment:
    """The gauges that take from readers of norms what these never put out."""
    spec, gauges = model.spec, {}
    for name, gain in spec.gauges.items():
        along = model.read(name).double().movedim(spec.read_dim(name), -1) @ void(model.read(gain).double())
        gauges[name] = -along.reshape(spec.tensors[bias_of(name)].layout.shape(spec.sizes))
    return Alignment(spec, {}, gauges=gauges)


def without_free_biases(spec: Spec, read: Read) -> Alignment:
    """The translations that make biases zero that may have any value. read: a bias by name, in float64."""
    shifts: dict[str, Tensor] = {}
    for rule in spec.shifts:
        bias = read(rule.bias)
        t = shifts.setdefault(rule.bias, torch.zeros_like(bias))
        _part(spec, rule, t).copy_(-_part(spec, rule, bias))
    return Alignment(spec, {}, shifts)


def _part(spec: Spec, rule: Shift, bias: Tensor) -> Tensor:
    return spec.part(rule.bias, bias, rule.axis).view


def _moved_along(spec: Spec, instance: Instance, norms: Tensor, found: Mapping[Instance, Element]) -> Tensor:
    """Norms as the axes around the instance move its batch."""
    along = Monomial(identity_index(norms.shape[-1], tuple(norms.shape[:-1])), norms)
    return reindexed(spec, instance, along, found.get).tensors()["scale"]


def _next(spec: Spec, left: Sequence[Instance]) -> tuple[Instance, list[Place], bool]:
    """The next instance that can be solved, the places that say how, and whether they do; if none can, the one with
    most of them."""
    blocking = {i for i in left if not isinstance(spec.axes[i.axis].group, Permutation)}
    around = {spec.instance(outer, spec.index_of(i)) for i in left for outer in spec.batch_axes(i.axis)}
    best: tuple[int, Instance, list[Place]] | None = None
    for instance in (i for i in left if i not in around):  # elements inside of others act first
        places = [*_places(spec, instance)]
        clear = [place for place in places if blocking.isdisjoint(_others(spec, instance, place))]
        whole, pair = len(clear) == len(places), isinstance(spec.axes[instance.axis].group, (*SOLVERS, Rotary))
        if clear and (whole or (not pair and _columns(spec, instance, clear) >= spec.axes[instance.axis].size)):
            return instance, clear if pair else _fewest(spec, instance, clear), True
        units = isinstance(spec.axes[instance.axis].group, PositiveMonomial | SignedMonomial)
        count = 0 if pair and not units else _columns(spec, instance, clear)
        if best is None or count > best[0]:
            best = count, instance, clear if count else places
    assert best is not None
    return best[1], best[2], best[0] > 0


def _places(spec: Spec, instance: Instance) -> Iterator[Place]:
    """The parts of tensors that have an axis once."""
    for name in spec.movable[instance]:
        if (name, instance.axis) not in spec.squares and name not in spec.tied:
            yield from ((name, at) for at in spec.occurrences[name, instance.axis])


def _others(spec: Spec, instance: Instance, place: Place) -> set[Instance]:
    """The other instances that act on a place."""
    name, at = place
    index, around = spec.tensors[name].index, {instance.axis, *spec.batch_axes(instance.axis)}
    return {spec.instance(a.name, index) for a in at.atoms if not a.name.isdigit() and a.name not in around}


def _columns(spec: Spec, instance: Instance, places: Sequence[Place]) -> int:
    """How many features of a unit the places have."""
    around = {instance.axis, *spec.batch_axes(instance.axis)}
    sizes = (
        [int(a.name) if a.name.isdigit() else spec.sizes[a.name] for a in at.atoms if a.name not in around]
        for _, at in places
    )
    return sum(map(math.prod, sizes))


def _fewest(spec: Spec, instance: Instance, places: list[Place]) -> list[Place]:
    """Of an axis of the whole model those places that are outside of layers and heads, if they are enough: so that a
    change of a layer or of a head is one there alone."""
    base = [p for p in places if layer_of(spec.tensors[p[0]].index) is None and p[0] not in spec.heads]
    if instance.index or _columns(spec, instance, base) < spec.axes[instance.axis].size:
        return places
    return base


def _solved(
    spec: Spec, instance: Instance, places: Sequence[Place], found: Mapping[Instance, Element], read: Read
) -> tuple[Element, Tensor | None, float]:
    """The element of an instance, the norms by which it orders, and how far it is determined."""
    parts: dict[Part, list[Tensor]] = {"primal": [], "dual": [], "plain": []}
    for name, at in places:
        parts[at.atom.part].append(at.unfold(move(spec, acting(spec, found, name), name, read(name))))
    batch, n = spec.batch(instance.axis), spec.axes[instance.axis].size
    none = torch.zeros(*batch, n, 0, dtype=torch.float64)
    primal, dual, plain = (torch.cat([none, *sides], -1) for sides in parts.values())
    group = spec.axes[instance.axis].group
    assert group is not None
    if isinstance(group, Orthogonal):
        element, sure = group.principal(torch.cat([primal, dual], -1))
        return element, None, float(sure.min())
    if isinstance(group, Centred):
        vectors = [at.unfold(read(name)) for name, at in _places(spec, instance) if len(at.atoms) == at.front]
        element, sure = group.principal(
            torch.cat([primal, dual], -1), torch.cat([torch.zeros_like(none).sum(-1, keepdim=True), *vectors], -1)
        )
        return element, None, float(sure.min())
    if isinstance(group, Phase | Rotary):
        return _planes(group, primal, dual)
    return _units(group, primal, dual, plain)


def _planes(group: Group, primal: Tensor, dual: Tensor) -> tuple[Element, None, float]:
    """The phase that makes the largest entry real and positive, and the scale that makes both sides equal."""
    p, d = (torch.linalg.matrix_norm(side) for side in (primal, dual))
    balanced = (p > 0) & (d > 0) & isinstance(group, Rotary)
    log = torch.where(balanced, (d / p).log() / 2, 0.0)
    both = torch.cat([primal * log.exp()[..., None, None], dual / log.exp()[..., None, None]], -1)
    size, first = torch.linalg.vector_norm(both, dim=-2).max(-1, keepdim=True)
    entry = torch.take_along_dim(both, first[..., None, :], -1)[..., 0]
    second = torch.linalg.vector_norm(both, dim=-2).scatter(-1, first, 0.0).amax(-1)
    angle = -torch.atan2(entry[..., 1], entry[..., 0])
    margin = torch.where(size[..., 0] > 0, 1 - second / size[..., 0].clamp_min(1e-300), 1.0)
    return group.near({"angle": angle, "log": log}), None, float(margin.min())


def _units(group: Group, primal: Tensor, dual: Tensor, plain: Tensor) -> tuple[Element, Tensor | None, float]:
    """Scales that make both sides equal, or where one side is not known yet the other one 1; then units by norm, the
    largest first, and their signs."""
    n, batch, pair = primal.shape[-2], tuple(primal.shape[:-2]), bool(primal.shape[-1] and dual.shape[-1])
    solve = next((solve for kind, solve in SOLVERS.items() if isinstance(group, kind)), None)
    if solve is not None and not isinstance(group, PositiveMonomial | SignedMonomial):
        if not pair:
            return group.identity(n, batch), None, 1.0
        element = solve(primal, dual)
        moved = element.act(primal, primal.ndim - 2)
        values = torch.linalg.vector_norm(moved, dim=-1)
        return element, None, float(torch.minimum(_gaps(values), signs_of(moved)[1].amin(-1)).min())
    felt, sure = torch.cat([primal, dual], -1), torch.ones(())
    index, scale = identity_index(n, batch), None
    if isinstance(group, Sign):
        sign, sure = signs_of(felt.flatten(-2))
        return Monomial(index, sign[..., None].expand(*batch, n).clone()), None, float(sure.min())
    if solve is not None:
        found = solve(primal, dual) if pair else _normed(primal, dual)
        assert isinstance(found, Monomial)
        felt = torch.cat([found.act(primal, primal.ndim - 2), found.dual().act(dual, dual.ndim - 2)], -1)
        scale = found.scale
    if isinstance(group, Signed) or (isinstance(group, SignedMonomial) and not pair):
        sign, sure = signs_of(felt)
        scale = sign if scale is None else sign * scale
    # Of units that were all given the norm 1 the mean of fourth powers says which is which.
    norms = torch.linalg.vector_norm(torch.cat([felt, plain], -1), 4 if solve is not None and not pair else 2, dim=-1)
    index = torch.argsort(norms, dim=-1, descending=True, stable=True)
    scale = None if scale is None else torch.take_along_dim(scale, index, -1)
    norms = torch.take_along_dim(norms, index, -1)
    return Monomial(index, scale), norms, float(torch.minimum(_gaps(norms).min(), sure.min()))


def _normed(primal: Tensor, dual: Tensor) -> Monomial:
    """The scales that give the one side that there is the norm 1."""
    p, d = (torch.linalg.vector_norm(side, dim=-1) for side in (primal, dual))
    scale = torch.where(p > 0, 1 / torch.where(p > 0, p, 1.0), torch.where(d > 0, d, 1.0))
    return Monomial(identity_index(scale.shape[-1], tuple(scale.shape[:-1])), scale)


def _gaps(sorted_values: Tensor) -> Tensor:
    """The smallest gap between two values of each row, sorted from the largest, relative to that; zeros do not tie."""
    gaps = -sorted_values.diff(dim=-1) / sorted_values[..., :1].clamp_min(1e-300)
    return torch.where(sorted_values[..., 1:] > 0, gaps, 1.0).amin(-1) if gaps.shape[-1] else torch.ones(())
