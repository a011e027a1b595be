"""Block coordinate descent over axes that meet: the residual stream, heads, and what is inside heads and layers.

Each block (one axis instance, all others fixed) is solved exactly by its group from its cross-Gram, so the squared
distance to the anchor never rises (Git Re-Basin, Algorithm 1; Theus et al. 2025, Algorithm 1). Blocks of different
layers do not meet each other, so they are solved in parallel, in turns with the axes that all layers share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.groups import Element, Group, PartMoments, add
from symfuse.matching.blocks import improve
from symfuse.matching.heads import match_outer
from symfuse.spec import Instance, Spec
from symfuse.stats import Read, is_square, weight_moments

# Sweeps end when one lowers the squared distance by less than this share of what is left, or after so many.
ENOUGH = 1e-4
SWEEPS = 30
ROUNDING = 1e-6  # of the squared distance: moved weights are rounded to float32, and distances summed anew

Skip = Collection[tuple[str, str]]
Watch = Callable[[str, float], None]  # the start and the squared distance, after each sweep


@dataclass(frozen=True)
class Descent:
    """What a start came to. curve: the squared distance over all parts that count, before and after each sweep."""

    start: str
    alignment: Alignment
    curve: tuple[float, ...]


@dataclass
class _Moved:
    """The source as moved so far, in memory, and the elements that moved it."""

    spec: Spec
    tensors: dict[str, Tensor]
    alignment: Alignment | None = None

    def apply(self, instance: Instance, element: Element) -> None:
        step = Alignment(self.spec, {instance: element})
        for name in self.spec.movable[instance]:
            if name in self.tensors:
                self.tensors[name] = step.move(name, self.tensors[name])
        self.alignment = step if self.alignment is None else step @ self.alignment


def descend(
    spec: Spec,
    anchor: Read,
    source: Read,
    instances: Sequence[Instance],
    groups: Mapping[Instance, Group],
    pool: Executor,
    *,
    names: Sequence[str],
    skip: Skip = (),
    starts: int = 2,
    seed: int = 0,
    watch: Watch | None = None,
) -> list[Descent]:
    """Descents from several starts, the best first: the identity; the shared axes from those tensors alone that no
    other axis can move (embeddings, positions, classifiers); then random elements of the shared axes.

    names: the tensors that both models have, which are kept in memory meanwhile. instances: what to match, with the
    group to use for each. skip: parts (name, atom) that do not count, such as biases that may be translated.
    """
    solver = _Solver(spec, {name: anchor(name) for name in names}.__getitem__, instances, groups, pool, skip)
    shared = [i for i in instances if not i.index]
    tried = ["identity", *(["embeddings"] if shared else []), *(f"random {k}" for k in range(starts - 2) if shared)]
    found = []
    for number, start in enumerate(tried[: max(1, starts)]):
        moved = _Moved(spec, {name: source(name) for name in names})
        first = solver.distance(moved)
        if start == "embeddings":
            for instance in shared:
                element = solver.from_fixed(instance, moved)
                if element is not None:
                    moved.apply(instance, element)
        elif start != "identity":
            rng = torch.Generator().manual_seed(seed + number)
            for instance in shared:
                moved.apply(instance, groups[instance].random(spec.axes[instance.axis].size, (), rng))
        found.append(_sweeps(solver, moved, start, first, random.Random(seed), watch))
    return sorted(found, key=lambda descent: descent.curve[-1])


def _sweeps(
    solver: _Solver, moved: _Moved, start: str, first: float, order: random.Random, watch: Watch | None
) -> Descent:
    curve = [first]
    current = first if start == "identity" else solver.distance(moved)
    rounding = ROUNDING * max(first, current)  # not of what is left, which may be nothing
    for _ in range(SWEEPS):
        gain = solver.sweep(moved, order)
        assert gain >= -rounding, f"a sweep raised the squared distance by {-gain}"
        current -= gain
        curve.append(current)
        if watch is not None:
            watch(start, current)
        if gain <= ENOUGH * abs(current):
            break
    return Descent(start, moved.alignment or Alignment(solver.spec, {}), tuple(curve))


@dataclass(frozen=True)
class _Solver:
    spec: Spec
    anchor: Read
    instances: Sequence[Instance]
    groups: Mapping[Instance, Group]
    pool: Executor
    skip: Skip

    def sweep(self, moved: _Moved, order: random.Random) -> float:
        """Every block once: the shared axes, and all layers at once, in random order. Returns what it gained."""
        shared: list[Instance | None] = [i for i in self.instances if not i.index]
        blocks: list[Instance | None] = [*shared, None] if len(shared) < len(self.instances) else shared
        return sum(
            self.layers(moved) if block is None else self.shared(moved, block)
            for block in order.sample(blocks, len(blocks))
        )

    def shared(self, moved: _Moved, instance: Instance) -> float:
        moments = self.moments(instance, moved, self.spec.movable[instance])
        return self.step(moved, instance, moments) if moments else 0.0

    def layers(self, moved: _Moved) -> float:
        """The instances of each layer, axes that others are inside of first; layers in parallel."""
        by_layer: dict[tuple[int, ...], list[Instance]] = {}
        for instance in self.instances:
            if instance.index:
                by_layer.setdefault(instance.index[:1], []).append(instance)

        def one(instances: list[Instance]) -> tuple[float, _Moved]:
            names = {name for instance in instances for name in self.spec.movable[instance]} & moved.tensors.keys()
            local = _Moved(self.spec, {name: moved.tensors[name] for name in names})
            gain, done = 0.0, set[Instance]()
            for instance in sorted(instances, key=lambda i: -self.spec.order.index(i.axis)):  # outer axes first
                inner = [i for i in instances if instance.axis in self.spec.batch_axes(i.axis)]
                if inner:
                    gain += self.outer(local, instance, inner)
                    done.update(inner)
                elif instance not in done:
                    gain += self.alone(local, instance)
            return gain, local

        gain = 0.0
        for more, local in self.pool.map(one, by_layer.values()):
            gain += more
            moved.tensors.update(local.tensors)  # of this layer only
            if local.alignment is not None:
                moved.alignment = local.alignment if moved.alignment is None else local.alignment @ moved.alignment
        return gain

    def outer(self, moved: _Moved, instance: Instance, inner: Sequence[Instance]) -> float:
        """Reorder an axis that others are inside of (heads), each pair scored at the best inner elements, if that and
        solving the inner axes is better than solving them as they are."""
        element = match_outer(self.spec, instance, inner, self.anchor, moved.tensors, self.groups, self.skip)
        before, trial = self.distance_of(moved), _Moved(self.spec, dict(moved.tensors), moved.alignment)
        for one in inner:
            self.alone(moved, one)
        if not element.is_identity():
            trial.apply(instance, element)
            for one in inner:
                self.alone(trial, one)
            if self.distance_of(trial) < self.distance_of(moved):
                moved.tensors, moved.alignment = trial.tensors, trial.alignment
        return before - self.distance_of(moved)

    def alone(self, moved: _Moved, instance: Instance) -> float:
        """One instance, in this thread."""
        names = [name for name in self.spec.movable[instance] if name in moved.tensors]
        read, group = moved.tensors.__getitem__, self.groups[instance]
        moments = weight_moments(self.spec, instance, self.anchor, read, group, self.skip, None, names)
        return self.step(moved, instance, moments) if moments else 0.0

    def moments(self, instance: Instance, moved: _Moved, names: Sequence[str]) -> PartMoments:
        """Of an axis that many tensors share: one tensor a thread."""
        group, read = self.groups[instance], moved.tensors.__getitem__

        def one(name: str) -> PartMoments:
            return weight_moments(self.spec, instance, self.anchor, read, group, self.skip, None, [name])

        total: PartMoments = {}
        for part in self.pool.map(one, [n for n in names if n in moved.tensors]):
            total = add(total, part)
        return total

    def step(self, moved: _Moved, instance: Instance, moments: PartMoments) -> float:
        """Apply the best element, if it is better than none. Where moments are linear to first order only, it is
        looked at whether it is."""
        element, before, after, better = improve(self.groups[instance], moments)
        if not bool(better.any()):
            return 0.0
        names = [name for name in self.spec.movable[instance] if name in moved.tensors]
        if not any(is_square(self.spec, instance, name) for name in names):
            moved.apply(instance, element)
            return float((before - after).sum())
        trial = _Moved(self.spec, dict(moved.tensors), moved.alignment)
        trial.apply(instance, element)
        gain = sum(self._gap(name, moved.tensors[name]) - self._gap(name, trial.tensors[name]) for name in names)
        if gain <= 0:
            return 0.0
        moved.tensors, moved.alignment = trial.tensors, trial.alignment
        return gain

    def from_fixed(self, instance: Instance, moved: _Moved) -> Element | None:
        """The best element of a shared axis for the tensors that nothing else moves."""
        fixed = [name for name in self.spec.movable[instance] if name in moved.tensors and self._moved_by(name) == 1]
        moments = self.moments(instance, moved, fixed)
        return self.groups[instance].best(moments) if moments else None

    def _moved_by(self, name: str) -> int:
        atoms = {atom.name for atom in self.spec.tensors[name].layout.atoms()}
        return sum(self.spec.axes[a].group is not None for a in atoms if not a.isdigit())

    def distance(self, moved: _Moved) -> float:
        return sum(self.pool.map(lambda name: self._gap(name, moved.tensors[name]), moved.tensors))

    def distance_of(self, moved: _Moved) -> float:
        return sum(self._gap(name, tensor) for name, tensor in moved.tensors.items())

    def _gap(self, name: str, tensor: Tensor) -> float:
        total = 0.0
        pairs = zip(self.spec.segments(name, self.anchor(name)), self.spec.segments(name, tensor), strict=True)
        for theirs, ours in pairs:
            if not any((name, str(atom)) in self.skip for atom in ours.atoms):
                total += float((theirs.view.to(ours.view.dtype) - ours.view).square().sum(dtype=torch.float64))
        return total
