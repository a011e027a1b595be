"""Matching from weights: for each axis instance the best element while all others stay fixed.

Two axes meet if they act on the same part of a tensor. Attention and feed-forward axes do not meet, so with the
residual stream and the order of heads fixed, one pass in any order is optimal; the instances are solved in parallel
threads, one BLAS thread each. If axes that meet are matched too, that pass follows a descent over all of these
(`descend`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.arguments import checked
from symfuse.device import CPU, budget, require
from symfuse.errors import OptionError
from symfuse.executors import Executor, Threads, one_torch_thread
from symfuse.groups import Element, Group, PartMoments, Permutation, Sinkhorn, add, objective
from symfuse.matching.blocks import improve
from symfuse.matching.descent import Watch, descend
from symfuse.matching.problem import problem_of, steps_of
from symfuse.matching.translations import translate
from symfuse.matching.transport import soften
from symfuse.model import Model
from symfuse.spec import Instance, Shift, Spec
from symfuse.stats import weight_moments, workspace


@dataclass(frozen=True)
class Step:
    """The result of matching one axis instance.

    before, after: the squared distance over the tensors that the axis acts on. units: how many elements (heads, or
    blocks of neurons) it has; moved: how many of them are not the identity. seconds: of its own thread.
    """

    instance: str
    group: str
    before: float
    after: float
    units: int
    moved: int
    seconds: float


# If biases make up more than this share of the remaining distance, they may change which element is best.
BIASES_MATTER = 0.01

# Where axes meet, the descent and the translations of biases alternate, until a descent gains less than this share, at
# most so many times.
SETTLED = 1e-3
ROUNDS = 5

OWN = 500_000_000  # bytes that the process needs without any weights

Progress = Callable[[Step, int], None]  # a finished step, and the number of all steps


@checked
def match_models(
    source: Model, anchor: Model, *, axes: str | tuple[str, ...] = "auto",
    layers: str | int | tuple[int, ...] | None = None, scaling: bool = True, groups: Mapping[str, str] | None = None,
    variants: Sequence[str] = (), one_pass: bool = False, biases: bool = True, starts: int = 2, seed: int = 0,
    frame: Sequence[str] | None = None, threads: int | None = None, memory: int | None = None, device: str = CPU,
    executor: Executor | None = None, progress: Progress | None = None, watch: Watch | None = None,
) -> Alignment:  # fmt: skip
    """The alignment that moves `source` towards `anchor`, from the weights.

    axes: what to match ("attention", "ffn", "qk", …). layers: which (see choose_layers). scaling: also rescale, where
    the group has scales besides rotations or permutations. groups: axis or word → the name of the group to match with
    ({"qk": "invertible", "residual": "permutation"}), or "none" (see `choose_groups`). one_pass: the rotation, then the
    scale, once, as in Zhang et al. 2025 (instead of alternately). biases: also translate biases where that is exact.
    starts, seed: of the descent over axes that meet (see `descend`); watch: called after each of its sweeps. frame: the
    rewrites before the elements (symfuse.rewriting); by default `rotatable` if the residual stream of a pre-norm model
    is rotated, else none. variants: names of inexact declarations (symfuse.model.variants). threads: workers, default
    all cores. memory: about how many bytes the process may use (default: a share of what is free). It limits how many
    axes are solved at once, at least one, and does not change the result. Both models are in memory if axes meet.
    device: on which both models are read and the axes solved (docs/gpu.md); memory is then that of the device.
    executor: solves the axes that do not meet others (`symfuse.executors`), with the same bits as threads.
    An element that does not lower its objective is replaced by the identity, which is left out of the alignment.
    Raises IncompatibleError, OptionError, CheckpointError (NaN or infinity, naming the tensor).
    """
    _require_counts(threads, starts)
    device = require(device)
    source, anchor = (model.on(device) for model in (source, anchor))
    problem = problem_of(
        source, anchor, axes, layers, scaling=scaling, groups=groups, variants=variants, frame=frame, one_pass=one_pass
    )
    source, anchor, spec, instances = problem.source, problem.anchor, problem.spec, list(problem.groups)
    hard, soft = problem.hard, any(isinstance(group, Sinkhorn) for group in problem.groups.values())
    rules = _translations(spec) if biases else {}
    shared = [name for name in spec.tensors if spec.shares(name, anchor.spec)]
    met = _meeting(spec, hard)
    meeting = [i for i in instances if spec.is_shared(i.axis) or (i.axis in met and i not in rules)]
    parts = _Parts(spec, hard, meeting, rules)
    room = (budget(device) if memory is None else memory) - OWN
    translated = [rule for i in instances if i not in meeting for rule in rules.get(i, [])]
    free = {(rule.bias, rule.axis) for rule in translated if rule.into is None}
    total, steps, curves = Alignment(spec, {}), list[dict[str, Any]](), dict[str, list[float]]()
    with _workers(threads) as (pool, count):
        executor = executor or Threads(count, room)
        for number in range(ROUNDS if meeting else 1):
            current = Model(total.on(source), spec) if number else source
            if meeting:
                read = anchor.read, current.read
                descents = descend(
                    spec, *read, instances, hard, pool, names=shared, skip=free,
                    starts=1 if number else starts, seed=seed, watch=watch,
                )  # fmt: skip
                best = descents[0]
                curves |= {f"{d.start}, round {number + 1}" if number else d.start: list(d.curve) for d in descents}
                if best.better:
                    total = best.alignment @ total
                    current = Model(total.on(source), spec)
                settled = bool(number) and best.curve[0] - best.curve[-1] < SETTLED * best.curve[0]
            inner, steps = parts.solve(current, anchor, executor, None if number else progress)
            total = inner @ total
            if not meeting or settled or not inner.shifts:
                break
        if soft:
            total = soften(problem, total, pool)
        if meeting or soft:
            steps = steps_of(problem, total)
    options: dict[str, Any] = {"scaling": scaling, "one_pass": one_pass, "biases": biases}
    options |= {"groups": dict(groups)} if groups else {}
    options |= {"starts": starts, "seed": seed} if meeting else {}
    elements = {i: g for i, g in total.elements.items() if not g.is_identity()}  # a later round may undo an earlier one
    more = {"descents": curves} if meeting else {}
    return problem.alignment(replace(total, elements=elements), "weights", options, steps, **more)


def _require_counts(threads: int | None, starts: int) -> None:
    if threads is not None and threads < 1:
        raise OptionError(f"threads {threads}: at least one is needed")
    if starts < 1:
        raise OptionError(f"starts {starts}: at least one is needed, the identity")


def _translations(spec: Spec) -> dict[Instance, list[Shift]]:
    """Axis instance → the rules of the biases that its translations act on."""
    rules: dict[Instance, list[Shift]] = {}
    for rule in spec.shifts:
        rules.setdefault(spec.instance(rule.axis.strip("*"), spec.tensors[rule.bias].index), []).append(rule)
    return rules


def _meeting(spec: Spec, groups: Mapping[Instance, Group]) -> set[str]:
    """The axes of single layers that meet others which are matched: axes that are reordered, or are inside of no other.
    Such are heads with matched axes inside, query heads beside the planes of their common key, and latents beside the
    heads that read them."""
    reordered = {i.axis for i, group in groups.items() if isinstance(group, Permutation)}
    parts = [{a.name for a in part} for declared in spec.tensors.values() for part in declared.layout.parts]
    inside = {i.axis for i in groups if not spec.is_shared(i.axis)}
    return {
        axis
        for axis in inside
        if axis in reordered or not spec.batch_axes(axis)
        if any(axis in part and any(b not in spec.batch_axes(axis) for b in part & inside - {axis}) for part in parts)
    }


@dataclass(frozen=True)
class _Parts:
    """The pass over single instances, which solves each of `groups` that is not in `meeting`, with its translations. If
    there are any in `meeting`, the descent has solved the rest too, and only instances with translations are left."""

    spec: Spec
    groups: Mapping[Instance, Group]
    meeting: Sequence[Instance]
    rules: Mapping[Instance, list[Shift]]

    def solve(
        self, source: Model, anchor: Model, executor: Executor, progress: Progress | None
    ) -> tuple[Alignment, list[dict[str, Any]]]:
        instances = [i for i in self.groups if i not in self.meeting and (not self.meeting or self.rules.get(i))]
        work = _Solve(_Pair(self.spec, source, anchor), self.groups, self.rules)
        running = executor.start(work, instances, memory=lambda i: workspace(self.spec, i, self.groups[i]))
        solved: dict[Instance, tuple[_Solution, Step]] = {}
        try:
            for done in running:
                solved[done.item] = done.result
                if progress is not None:
                    progress(done.result[1], len(instances))
        finally:
            running.stop()
        elements: dict[Instance, Element] = {}
        shifts: dict[str, Tensor] = {}
        steps = []
        for instance in instances:  # in a fixed order, so that sums are rounded in the same way in each run
            solution, step = solved[instance]
            if solution.changed:
                elements[instance] = solution.element
            for name, t in solution.shifts.items():
                shifts[name] = shifts[name] + t if name in shifts else t
            steps.append({key: value for key, value in asdict(step).items() if key != "seconds"})
        return Alignment(self.spec, elements, {n: t for n, t in shifts.items() if bool(t.any())}), steps


@dataclass(frozen=True)
class _Solution:
    """The solution of one instance, on the processor. before, after: the squared distance over the tensors that the
    axis acts on. changed: how many of its units are not the identity."""

    group: str
    element: Element
    shifts: Mapping[str, Tensor]
    before: float
    after: float
    units: int
    changed: int


@dataclass(frozen=True)
class _Pair:
    """A source and its anchor under one declaration."""

    spec: Spec
    source: Model
    anchor: Model

    def solve(self, instance: Instance, group: Group, rules: list[Shift]) -> _Solution:
        """The best element of one axis instance, and the best translations of its biases.

        A bias with a free translation (keys) is left out of the objective. The translation of a value bias also changes
        the output bias. Then there are two candidates: the best element without the value bias, and the best one with
        it, which is tried if the biases matter. The third candidate is the identity, with its own translations.
        """
        free = {(rule.bias, rule.axis) for rule in rules if rule.into is None}
        paid = {(rule.bias, rule.axis) for rule in rules if rule.into is not None}
        moments = self._moments(instance, group, free | paid)
        element, before, after, better = improve(group, moments)

        def translated(g: Element | None) -> tuple[dict[str, Tensor], float]:
            return translate(self.spec, instance, g, rules, self.anchor.read, self.source.read)

        start = before.sum().item() + translated(None)[1]
        shifts, rest = translated(element)
        candidates = [(after.sum().item() + rest, element, shifts, int(better.sum()))]
        if rest > BIASES_MATTER * candidates[0][0]:
            biases = self._moments(instance, group, free, only=paid)
            other, _, _, changed = improve(group, add(moments, biases))
            shifts, rest = translated(other)
            candidates.append((objective(other, moments).sum().item() + rest, other, shifts, int(changed.sum())))
        if min(candidates, key=_cost)[0] > start:
            identity = group.identity(element.size, element.batch)
            shifts, rest = translated(identity)
            candidates.append((before.sum().item() + rest, identity, shifts, 0))
        cost, best, shifts, changed_units = min(candidates, key=_cost)
        shifts = {name: t.cpu() for name, t in shifts.items()}
        return _Solution(group.label, best.to(CPU), shifts, start, cost, before.numel(), changed_units)

    def _moments(
        self,
        instance: Instance,
        group: Group,
        skip: Collection[tuple[str, str]],
        only: Collection[tuple[str, str]] | None = None,
    ) -> PartMoments:
        """From tensors in their stored dtypes, which `weight_moments` widens one at a time."""
        read, scanned = (self.anchor.unrounded, self.source.unrounded), (self.anchor.scanned, self.source.scanned)
        return weight_moments(self.spec, instance, *read, group, skip, only, scanned=scanned)


@dataclass(frozen=True)
class _Solve:
    """The work of an executor: one instance."""

    pair: _Pair
    groups: Mapping[Instance, Group]
    rules: Mapping[Instance, list[Shift]]

    def __call__(self, instance: Instance, _stop: threading.Event) -> tuple[_Solution, Step]:
        start = time.perf_counter()
        solution = self.pair.solve(instance, self.groups[instance], self.rules.get(instance, []))
        about = (str(instance), solution.group, solution.before, solution.after, solution.units, solution.changed)
        return solution, Step(*about, time.perf_counter() - start)


def _cost(candidate: tuple[float, Element, Mapping[str, Tensor], int]) -> float:
    return candidate[0]


@contextmanager
def _workers(threads: int | None) -> Iterator[tuple[ThreadPoolExecutor, int]]:
    """Worker threads, of which each has one BLAS thread, and their number."""
    with one_torch_thread() as before, ThreadPoolExecutor(threads or before) as pool:
        try:
            yield pool, threads or before
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
