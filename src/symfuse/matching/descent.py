"""Block coordinate descent over axes that meet: the residual stream, heads, and what is inside heads and layers.

Each block (one axis instance, all others fixed) is solved exactly by its group from its cross-Gram matrix, so the
squared distance to the anchor never rises (Git Re-Basin, Algorithm 1; Theus et al. 2025, Algorithm 1). Blocks of
different layers act on different tensors, so all layers are solved in parallel, alternating with the shared axes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.device import CPU
from symfuse.groups import Element, Group, PartMoments, add
from symfuse.matching.blocks import improve
from symfuse.matching.heads import match_outer, reordered_inside
from symfuse.matching.workspace import Workspace, each
from symfuse.spec import Instance, Memo, Spec
from symfuse.stats import Read, weight_moments
from symfuse.stats.weights import require_products

# Sweeps end when one lowers the squared distance by less than this share of it, or after so many.
ENOUGH = 1e-4
SWEEPS = 30
SMALL = 1 << 18  # parameters of a model that is too small for threads to save time
ROUNDING = 1e-6  # of the squared distance, from weights rounded to float32 and from sums in another order

Skip = Collection[tuple[str, str]]
Solve = Callable[[Workspace, Instance], float]
Watch = Callable[[str, float], None]  # the start and the squared distance, after each sweep


@dataclass(frozen=True)
class Descent:
    """The result of one start. curve: the squared distance over all parts but those of `skip`, at the start and after
    each sweep. unaligned: that of the unaligned source, at which the curve of the start "identity" begins. alignment:
    on the processor."""

    start: str
    alignment: Alignment
    curve: tuple[float, ...]
    unaligned: float

    @property
    def better(self) -> bool:
        """Whether the alignment lowers the distance."""
        return self.curve[-1] < self.unaligned


def descend(
    spec: Spec,
    anchor: Read,
    source: Read,
    instances: Sequence[Instance],
    groups: Mapping[Instance, Group],
    pool: Executor | None,
    *,
    names: Sequence[str],
    skip: Skip = (),
    starts: int = 2,
    seed: int = 0,
    watch: Watch | None = None,
) -> list[Descent]:
    """Descents from several starts, sorted from the best. The starts are the identity; the best elements of the shared
    axes for the tensors on which no other axis acts (embeddings, positions, classifiers); random elements of these.

    names: the tensors that both models have, which are kept in memory. instances: what to match; groups: how. skip:
    parts (name, atom) that are left out of the distance, such as biases that may be translated. starts: at most.
    """
    theirs, ours = (dict(zip(names, each(pool, read, names), strict=True)) for read in (anchor, source))
    pool = pool if sum(tensor.numel() for tensor in ours.values()) > SMALL else None
    sweeper = Sweeper(spec, theirs.__getitem__, instances, groups, pool, skip)
    unaligned = sweeper.distance(Workspace(spec, ours))
    shared = [i for i in instances if spec.is_shared(i.axis)]
    tried = ["identity", *(["embeddings"] if shared else []), *(f"random {k}" for k in range(starts - 2) if shared)]
    descents = []
    for number, start in enumerate(tried[: max(1, starts)]):
        work = Workspace(spec, dict(ours))
        if start == "embeddings":
            for instance in shared:
                element = sweeper.from_fixed(instance, work)
                if element is not None:
                    work.apply(instance, element, pool)
        elif start != "identity":
            rng = torch.Generator().manual_seed(seed + number)
            for instance in shared:
                element = groups[instance].random(spec.axes[instance.axis].size, (), rng)
                work.apply(instance, element.to(work.device), pool)
        descents.append(_sweeps(sweeper, work, start, unaligned, random.Random(seed), watch))
    return sorted(descents, key=lambda descent: descent.curve[-1])


def _sweeps(
    sweeper: Sweeper, work: Workspace, start: str, unaligned: float, order: random.Random, watch: Watch | None
) -> Descent:
    current = unaligned if start == "identity" else sweeper.distance(work)
    curve = [current]
    rounding = ROUNDING * max(unaligned, current)  # relative to the start, as the distance may become 0
    for number in range(SWEEPS):
        gain = sweeper.sweep(work, order, layers_first=number == 0 and start != "identity")
        assert gain >= -rounding, f"a sweep raised the squared distance by {-gain}"
        current -= gain
        curve.append(current)
        if watch is not None:
            watch(start, current)
        if gain <= ENOUGH * abs(current):
            break
    return Descent(start, Alignment(sweeper.spec, work.elements).to(CPU), tuple(curve), unaligned)


@dataclass(frozen=True)
class Sweeper:
    """Sweeps over the blocks of a pair. anchor: reads a tensor, in memory. skip: as in `descend`."""

    spec: Spec
    anchor: Read
    instances: Sequence[Instance]
    groups: Mapping[Instance, Group]
    pool: Executor | None
    skip: Skip

    def sweep(self, work: Workspace, order: random.Random, *, layers_first: bool = False) -> float:
        """Solve every block once, in random order: each shared axis (of heads that all layers share, with the axes
        inside), and all layers together. Returns by how much the squared distance fell.

        layers_first: after a start that has set the shared axes. If they were solved again before the layers, the
        layers that are not matched yet would spoil them (the rotation of a stream of 30 layers was not recovered).
        A block is skipped if its tensors have not changed since it was optimal.
        """
        blocks: list[Instance | None] = [*self.of_all_layers, *([None] if self.by_layer else [])]
        drawn = order.sample(blocks, len(blocks))
        if layers_first:
            drawn.sort(key=lambda block: block is not None)
        return sum(
            self.layers(work)
            if block is None
            else self.solved(work, block, self.outer if self.inner[block] else self.shared)
            for block in drawn
        )

    def solved(self, work: Workspace, instance: Instance, solve: Solve) -> float:
        """The gain of solving a block; 0 if it is known to be optimal.

        One step makes a block optimal if its solution is a closed form, of moments that are linear in the element.
        Other blocks are optimal when a step no longer changes them.
        """
        before = work.version(instance)
        if work.solved.get(instance) == before:
            return 0.0
        gain = solve(work, instance)
        exact = self.groups[instance].self_dual and not self.inner[instance] and not self.square(work, instance)
        work.solved[instance] = work.version(instance) if exact else before
        return gain

    def shared(self, work: Workspace, instance: Instance) -> float:
        moments = self.moments(instance, work, work.touched(instance))
        return self.step(work, instance, moments, self.pool) if moments else 0.0

    def layers(self, work: Workspace) -> float:
        """Solve the instances of each layer, outer axes first; layers, and attention outside of layers, in parallel."""

        def one(instances: list[Instance]) -> tuple[float, Workspace]:
            part = work.part(instances)
            return sum(self.solved(part, instance, solve) for instance, solve in self.nested(instances)), part

        results = each(self.pool, one, self.by_layer)
        work.join([part for _, part in results])
        return sum(gain for gain, _ in results)

    @cached_property
    def of_all_layers(self) -> list[Instance]:
        """The instances that all layers share."""
        return [i for i in self.instances if self.spec.is_shared(i.axis)]

    @cached_property
    def by_layer(self) -> list[list[Instance]]:
        """The other instances, by layer, and those of attention outside of layers; outer axes first."""
        layers: dict[tuple[int, ...], list[Instance]] = {}
        for instance in self.instances:
            if not self.spec.is_shared(instance.axis):
                layers.setdefault(instance.index[:1], []).append(instance)
        return [sorted(layer, key=lambda i: -self.spec.order.index(i.axis)) for layer in layers.values()]

    @cached_property
    def inner(self) -> Mapping[Instance, list[Instance]]:
        """Instance of an outer axis → the instances inside of it, of which those with others inside come first."""

        def inside(outer: Instance) -> list[Instance]:
            named = [i for i in self.instances if outer.axis in self.spec.batch_axes(i.axis)]
            inner = [i for i in named if i.index[: len(outer.index[:1])] == outer.index[:1]]
            return sorted(inner, key=lambda i: not any(i.axis in self.spec.batch_axes(one.axis) for one in inner))

        return Memo(inside)

    def nested(self, instances: Sequence[Instance]) -> Iterator[tuple[Instance, Solve]]:
        """The instances that are inside of none before them, each with its solver."""
        done = set[Instance]()
        for instance in instances:
            inner = self.inner[instance]
            done.update(inner)
            if instance not in done:
                yield instance, self.outer if inner else self.alone

    def outer(self, work: Workspace, instance: Instance) -> float:
        """Reorder an outer axis (heads), each pair scored at its best inner elements, and then solve the inner axes. If
        solving the inner axes alone is better, it is not reordered."""
        inner, names = self.inner[instance], work.touched(instance)
        element = match_outer(self.spec, instance, inner, self.anchor, work.tensors, self.groups, self.skip)
        reordered = reordered_inside(self.spec, instance, names, {i: self.groups[i] for i in inner})
        if element.is_identity() and not reordered:
            return sum(solve(work, one) for one, solve in self.nested(inner))
        before, trial = self.distance_of(work, names), work.trial()
        gain = sum(solve(work, one) for one, solve in self.nested(inner))
        trial.apply(instance, element)
        for one in inner if reordered else ():
            if one.axis not in reordered:
                self.lead(trial, one, reordered)
        for one, solve in self.nested(sorted(inner, key=lambda i: i.axis not in reordered)):
            solve(trial, one)
        better = before - self.distance_of(trial, names)
        if better <= gain:
            return gain
        work.take(trial)
        return better

    def lead(self, work: Workspace, instance: Instance, reordered: AbstractSet[str]) -> None:
        """Solve an instance from the parts without axes that are reordered beside it (rotary planes from the keys, not
        the queries). Parts whose units are still in a wrong order would give a wrong element, from which the order is
        then not found either."""
        names = work.touched(instance)
        parts = [(name, part) for name in names for part in self.spec.tensors[name].layout.parts]
        only = {
            (name, str(atom))
            for name, part in parts
            for atom in part
            if atom.name == instance.axis and reordered.isdisjoint(one.name for one in part)
        }
        group = self.groups[instance].usual()
        moments = self._weights(instance, work, names, group, only) if only else {}
        if moments:
            work.apply(instance, group.best(moments))

    def alone(self, work: Workspace, instance: Instance) -> float:
        """One instance, in this thread."""
        moments = self._weights(instance, work, work.touched(instance), self.groups[instance])
        return self.step(work, instance, moments) if moments else 0.0

    def moments(self, instance: Instance, work: Workspace, names: Sequence[str]) -> PartMoments:
        """The moments of an axis that many tensors share: each layer in its own thread, tensors outside of layers
        first."""
        index = {name: self.spec.tensors[name].index for name in names}
        layers = groupby(sorted(names, key=lambda name: sorted(index[name].items())), index.__getitem__)
        jobs = [list(of) for _, of in layers]
        total: PartMoments = {}
        for part in each(self.pool, lambda of: self._weights(instance, work, of, self.groups[instance]), jobs):
            total = add(total, part)
        return total

    def _weights(
        self,
        instance: Instance,
        work: Workspace,
        names: Sequence[str],
        group: Group,
        only: Collection[tuple[str, str]] | None = None,
    ) -> PartMoments:
        read = work.tensors.__getitem__
        return weight_moments(self.spec, instance, self.anchor, read, group, self.skip, only, names)

    def step(self, work: Workspace, instance: Instance, moments: PartMoments, pool: Executor | None = None) -> float:
        """Apply the best element, if it lowers the distance, and return by how much. Where a tensor has the axis twice,
        the moments are a linear approximation, and the distance is computed to see whether it falls."""
        element, before, after, better = improve(self.groups[instance], moments)
        if not bool(better.any()):
            return 0.0
        if not self.square(work, instance):
            work.apply(instance, element, pool)
            return float((before - after).sum())
        trial, names = work.trial(), work.touched(instance)
        trial.apply(instance, element, pool)
        gain = self.distance_of(work, names) - self.distance_of(trial, names)
        if gain <= 0:
            return 0.0
        work.take(trial)
        return gain

    def square(self, work: Workspace, instance: Instance) -> bool:
        """Whether a tensor has the axis twice."""
        squares = self.spec.squares
        return bool(squares) and any((name, instance.axis) in squares for name in work.touched(instance))

    def from_fixed(self, instance: Instance, work: Workspace) -> Element | None:
        """The best element of a shared axis for the tensors that no other axis acts on."""
        fixed = [name for name in work.touched(instance) if self._axes_of(name) == 1]
        moments = self.moments(instance, work, fixed)
        return self.groups[instance].best(moments) if moments else None

    def _axes_of(self, name: str) -> int:
        axes = self.spec.tensors[name].layout.names
        return sum(self.spec.axes[axis].group is not None for axis in axes if not axis.isdigit())

    def distance(self, work: Workspace) -> float:
        """The squared distance over all tensors; CheckpointError if it overflows."""
        total = sum(each(self.pool, lambda name: self._gap(name, work.tensors[name]), work.tensors))
        names, sums = list(work.tensors), [torch.tensor(total, dtype=torch.float64)]
        dtype = work.tensors[names[0]].dtype if names else torch.float64
        require_products(self.instances[0], sums, dtype, names, self.anchor, work.tensors.__getitem__)
        return total

    def distance_of(self, work: Workspace, names: Sequence[str]) -> float:
        """The squared distance over some tensors, computed in this thread."""
        return sum(self._gap(name, work.tensors[name]) for name in names)

    def _gap(self, name: str, tensor: Tensor) -> float:
        total = 0.0
        parts, views = self.spec.tensors[name].layout.parts, self.spec.views
        for theirs, ours, atoms in zip(views(name, self.anchor(name)), views(name, tensor), parts, strict=True):
            if not self.skip or not any((name, str(atom)) in self.skip for atom in atoms):
                total += float((theirs.to(ours.dtype) - ours).square().sum(dtype=torch.float64))
        return total
