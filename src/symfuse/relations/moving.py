"""The alignment that a relation is read from: over all axes, in the largest groups that may act.

Least squares alone would spread what differs over all tensors: of a moved LoRA no matrix would be left unchanged. So
an element from single tensors is preferred where it makes these equal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.alignment.order import without_free_biases, without_gauges
from symfuse.errors import SymmetryError
from symfuse.groups import Element, Group, Permutation, Signed
from symfuse.matching.descent import ENOUGH, Sweeper
from symfuse.matching.problem import problem_of, rotatable
from symfuse.matching.workspace import Workspace
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Instance, Spec
from symfuse.stats import weight_moments

SWEEPS = 12
STEPS, ENOUGH_LEFT = 4, 0.9  # of a trimmed descent, which ends when more than that share is left
EXACT = 1e-4  # of the norm: what is nearer than that after moving, is the same tensor but for rounding


@dataclass(frozen=True)
class Pair:
    """Two models of one shape in one frame, with all tensors that both have, the source's moved. names: of these
    tensors. elements: what moved them. In place they are read when they are asked for, else they are in memory."""

    spec: Spec
    names: tuple[str, ...]
    source: Mapping[str, Tensor]
    anchor: Mapping[str, Tensor]
    elements: Mapping[Instance, Element] = field(default_factory=dict)

    def dims(self, name: str) -> int:
        """Of a tensor, without reading it."""
        return len(self.spec.tensors[name].layout.dims)


@dataclass(frozen=True, eq=False)
class OnDemand(Mapping[str, Tensor]):
    """The tensors of these names, each read again whenever it is asked for."""

    model: Model
    names: Mapping[str, None]

    def __getitem__(self, name: str) -> Tensor:
        return self.model.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def in_place(source: Model, anchor: Model) -> Pair:
    """Both as they are."""
    names = tuple(name for name in source.spec.tensors if source.spec.shares(name, anchor.spec))
    ours, theirs = (OnDemand(model, dict.fromkeys(names)) for model in (source, anchor))
    return Pair(source.spec, names, ours, theirs)


def frame_of(models: Sequence[Model]) -> tuple[str, ...]:
    """The rewrites in which most of a group may act: those of a rotatable stream, or what removes gauges; untied."""
    spec = models[0].spec
    choices = [rotatable(spec)] if spec.reads else []
    for frame in [*choices, ("untie", "drop_gauges"), ("untie",)]:
        try:
            for model in models:
                canonical(model, frame)
        except SymmetryError:
            continue
        return frame
    return ()


def matched(source: Model, anchor: Model, *, quick: bool = False) -> Pair:
    """The source moved onto the anchor. quick: the stream from what is outside of layers alone, without sweeps.

    In a frame in which heads are balanced, so that only rotations are left inside of them, the stream is matched by
    tensors outside of layers, then layers, then all in turns unless what is outside is equal already. In the frame
    without balancing the order of units and the stream are taken from there, and all that balancing decided is solved
    again, from all tensors or from one. Raises IncompatibleError and OptionError as `match` does.
    """
    frame = frame_of([source, anchor])
    source, anchor = settled(source, frame), settled(anchor, frame)
    order, pair = _order(source, anchor, quick=quick), _pair(source, anchor)
    work = Workspace(pair.spec, dict(pair.source))
    for instance in sorted(order, key=lambda i: pair.spec.order.index(i.axis)):
        work.apply(instance, order[instance])
    _inside(pair, work)
    if not quick:
        _concentrated(pair, work)
    return replace(pair, source=work.tensors, elements=work.elements)


def settled(model: Model, frame: Sequence[str]) -> Model:
    """The same function in a frame, with what is free set to nothing: of weights the component along what a norm never
    puts out (`Spec.gauges`), and biases that may be translated (`Spec.shifts`). Applied to its own result it changes
    nothing, up to rounding."""
    gauges = without_gauges(model)
    model = canonical(_by(model, gauges) if gauges.gauges else model, frame)
    shifts = without_free_biases(model.spec, lambda name: model.read(name).double())
    return _by(model, shifts) if shifts.shifts else model


def _by(model: Model, alignment: Alignment) -> Model:
    return Model(alignment.on(model).replace(name=model.checkpoint.name), model.spec, model.notes)


def _pair(source: Model, anchor: Model) -> Pair:
    pair = in_place(source, anchor)
    return replace(pair, source=dict(pair.source), anchor=dict(pair.anchor))


def _order(source: Model, anchor: Model, *, quick: bool) -> dict[Instance, Element]:
    """The elements of all axes that balancing does not change: streams, heads, neurons, planes."""
    problem = problem_of(source, anchor, "all", None, scaling=True, frame=("balance",))
    pair = _pair(problem.source, problem.anchor)
    instances, groups = list(problem.groups), problem.hard
    sweeper = Sweeper(pair.spec, pair.anchor.__getitem__, instances, groups, None, ())
    work = Workspace(pair.spec, dict(pair.source))
    for instance in streams(pair.spec):
        if instance in groups and (names := outside(pair, instance)):
            work.apply(instance, _best(pair, work, instance, groups[instance], names))
    sweeper.layers(work)
    left = sweeper.distance(work)
    if not quick and left > EXACT**2 * sum(float(t.double().square().sum()) for t in pair.anchor.values()):
        for _ in range(SWEEPS):
            gain = sweeper.sweep(work, random.Random(0))
            left -= gain
            if gain <= ENOUGH * abs(left):
                break
    return {i: g for i, g in work.elements.items() if not _is_again(pair.spec, i.axis)}


def _is_again(spec: Spec, axis: str) -> bool:
    """Whether an axis is solved again once all others are known: what is inside of heads, planes, scales of neurons."""
    outer = {per for one in spec.axes.values() for per in one.per}
    return (
        not spec.is_shared(axis) and axis not in outer and not isinstance(spec.axes[axis].group, Permutation | Signed)
    )


def streams(spec: Spec) -> list[Instance]:
    """The axes that all layers share and that others are not inside of."""
    outer = {per for one in spec.axes.values() for per in one.per}
    return [i for i in spec.movable if spec.is_shared(i.axis) and i.axis not in outer]


def outside(pair: Pair, instance: Instance) -> list[str]:
    """The matrices on which only this axis acts, and no other: embeddings, positions, classifiers."""
    return [n for n in pair.spec.movable[instance] if n in pair.anchor and pair.anchor[n].ndim > 1
            and len(pair.spec.touched[n]) == 1]  # fmt: skip


def _concentrated(pair: Pair, work: Workspace) -> None:
    """Solve streams again from the half of their matrices that is nearest already, and what is inside of layers after
    it, as long as that half comes nearer: least trimmed squares (Rousseeuw & Van Driessen 2006, C-steps), so that what
    was trained in some matrices does not move the others."""
    found = [i for i in streams(pair.spec) if not isinstance(pair.spec.axes[i.axis].group, Permutation | Signed)]
    for instance in found:
        names = [n for n in work.touched(instance) if pair.anchor[n].ndim > 1]
        before = math.inf
        for _ in range(STEPS):
            gaps = {n: _gap(work.tensors[n], pair.anchor[n]) for n in names}
            half = sorted(names, key=gaps.__getitem__)[: (len(names) + 1) // 2]
            left = sum(gaps[name] for name in half)
            if left > ENOUGH_LEFT * before or left <= EXACT * len(half):
                break
            group = pair.spec.axes[instance.axis].group
            assert group is not None
            work.apply(instance, _best(pair, work, instance, group, half))
            _inside(pair, work)
            before = left


def _inside(pair: Pair, work: Workspace) -> None:
    for instance in (i for i in pair.spec.movable if _is_again(pair.spec, i.axis)):
        element = _solved(pair, work, instance)
        if element is not None:
            work.apply(instance, element)


def _solved(pair: Pair, work: Workspace, instance: Instance) -> Element | None:
    """The element of an axis whose tensors are then nearest, by the sum of their relative distances (not squared): from
    all of them, or from one."""
    group = pair.spec.axes[instance.axis].group
    assert group is not None
    names = [name for name in work.touched(instance) if pair.anchor[name].ndim > 1]
    best, cost = None, sum(_gap(work.tensors[name], pair.anchor[name]) for name in names)
    for some in [names, *([name] for name in names if len(names) > 1)]:
        element = _best(pair, work, instance, group, some)
        trial = work.part([instance])
        trial.apply(instance, element)
        left = sum(_gap(trial.tensors[name], pair.anchor[name]) for name in names)
        if left < cost * (1 - 1e-6):
            best, cost = element, left
    return best


def _best(pair: Pair, work: Workspace, instance: Instance, group: Group, names: Sequence[str]) -> Element:
    read: Callable[[str], Tensor] = work.tensors.__getitem__
    moments = weight_moments(pair.spec, instance, pair.anchor.__getitem__, read, group, names=list(names))
    return group.best(moments)


def _gap(x: Tensor, y: Tensor) -> float:
    size = float(torch.linalg.vector_norm(y, dtype=torch.float64))
    return float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) / size if size else 0.0
