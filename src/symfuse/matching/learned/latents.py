"""The learned parameters (latents) of one model's elements. Those of all layers are in one tensor; the group maps them
to elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from symfuse.groups import Action, Coupling, Element, Group, Monomial, subgroups
from symfuse.groups.assignment import assign_batch
from symfuse.groups.relaxed import Relaxed, soft, straight_through
from symfuse.matching.learned.settings import Permutations
from symfuse.spec import Instance, Shift, Spec, bias_of

SCORES = "scores"  # beside the names of a group's own parameters
# Odds of soft permutations: the weight of a unit with score 1, relative to that of all others with score 0 together.
# Annealed permutations go from WARM to COLD; those that stay soft keep TEPID.
WARM, TEPID, COLD = 1.0, 10.0, 1000.0


@dataclass(frozen=True)
class Latents:
    """The parameters of elements that start as the identity, for a model that is aligned already.

    translations: of biases that are compensated in another bias (values), by the number of the rule in the declaration.
    gauges: by weight that reads a norm (Spec.gauges). All leaves have the dtype of the learning. Permutations are
    learned where the group of an axis contains any, unless `permutations` is "kept".
    """

    spec: Spec
    stacks: tuple[Stack, ...]
    translations: Mapping[int, Tensor]
    gauges: Mapping[str, Tensor]
    permutations: Permutations

    @classmethod
    def of(
        cls,
        spec: Spec,
        groups: Mapping[Instance, Group],
        permutations: Permutations,
        dtype: torch.dtype,
        device: str,
        *,
        biases: bool = True,
    ) -> Latents:
        """biases: whether translations and gauges are learned too."""
        alike: dict[tuple[Group, int, tuple[int, ...]], list[Instance]] = {}
        for instance, group in groups.items():
            n, batch = spec.axes[instance.axis].size, spec.batch(instance.axis)
            alike.setdefault((group, n, batch), []).append(instance)
        stacks = []
        for (group, n, batch), instances in alike.items():
            many = (len(instances), *batch)
            starts = {name: torch.zeros(*many, *shape, dtype=dtype) for name, shape in group.tangent(n).items()}
            if permutations != "kept" and reorders(group, n):
                starts[SCORES] = torch.eye(n, dtype=dtype).repeat(*many, 1, 1)
            if starts:
                leaves = {name: start.to(device).requires_grad_() for name, start in starts.items()}
                stacks.append(Stack(group, n, tuple(instances), leaves))
        translations = {
            number: torch.zeros_like(_part(spec, rule, _zeros(spec, rule, dtype, device))).requires_grad_()
            for number, rule in enumerate(spec.shifts)
            if biases and rule.into is not None and _instance_of(spec, rule) in groups
        }
        touched = {name for instance in groups for name in spec.movable[instance]}
        gauges = {
            reader: torch.zeros(spec.tensors[bias_of(reader)].layout.shape(spec.sizes), dtype=dtype, device=device)
            for reader in spec.gauges
            if biases and reader in touched
        }
        leaves = {reader: v.requires_grad_() for reader, v in gauges.items()}
        return cls(spec, tuple(stacks), translations, leaves, permutations)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """All parameters, by names that are the same in each run."""
        named = {f"{i}.{name}": leaf for i, stack in enumerate(self.stacks) for name, leaf in stack.leaves.items()}
        named |= {f"translation {number}": leaf for number, leaf in self.translations.items()}
        return named | {f"gauge {reader}": leaf for reader, leaf in self.gauges.items()}

    def actions(self, odds: float | None = None) -> dict[Instance, Action]:
        """The elements as functions of the parameters, with graphs. odds: of soft permutations (see WARM); None: they
        are hard."""
        relax = straight_through if odds is None else partial(_soft, odds=odds)
        return {instance: g for stack in self.stacks for instance, g in stack.actions(relax)}

    def shifts(self) -> dict[str, Tensor]:
        """The translation of each bias, with its graph."""
        shifts: dict[str, Tensor] = {}
        for number, leaf in self.translations.items():
            rule = self.spec.shifts[number]
            whole = shifts.setdefault(rule.bias, _zeros(self.spec, rule, leaf.dtype, str(leaf.device)))
            _part(self.spec, rule, whole).copy_(leaf)
        return shifts

    @torch.no_grad()
    def elements(self) -> dict[Instance, Element]:
        """The elements that the parameters define, in float64; couplings where permutations stay soft."""
        return {i: g for stack in self.stacks for i, g in stack.elements(self.permutations == "soft")}


@dataclass(frozen=True)
class Stack:
    """Instances with equal groups and sizes. leaves: the parameters by name, each [instances, *b, …]."""

    group: Group
    size: int
    instances: tuple[Instance, ...]
    leaves: Mapping[str, Tensor]

    def actions(self, relax: Callable[[Tensor], Relaxed]) -> Iterator[tuple[Instance, Action]]:
        near = self._near(self.leaves)
        relaxed = relax(self.leaves[SCORES]) if SCORES in self.leaves else None
        for i, instance in enumerate(self.instances):
            own = None if near is None else near.rebuild({key: t[i] for key, t in near.tensors().items()})
            if relaxed is None:
                assert own is not None
                yield instance, own
            else:
                index = None if relaxed.index is None else relaxed.index[i]
                yield instance, Relaxed(relaxed.scores[i], index, own.tensors()["scale"] if own is not None else None)

    def elements(self, soft_too: bool) -> Iterator[tuple[Instance, Element]]:
        """float64, on the processor, one by one."""
        wide = {name: leaf.detach().cpu().double() for name, leaf in self.leaves.items()}
        near = self._near(wide)
        for i, instance in enumerate(self.instances):
            own = None if near is None else near.rebuild({key: t[i].clone() for key, t in near.tensors().items()})
            if SCORES in wide:
                if soft_too:
                    yield instance, Coupling(_soft(wide[SCORES][i], TEPID).scores)
                    continue
                order = Monomial(assign_batch(wide[SCORES][i]))
                own = order if own is None else own @ order
            assert own is not None
            yield instance, own

    def _near(self, leaves: Mapping[str, Tensor]) -> Element | None:
        own = {name: leaf for name, leaf in leaves.items() if name != SCORES}
        return self.group.near(own) if own else None


def reorders(group: Group, n: int) -> bool:
    """Whether the group on n units contains permutations, and its elements are monomial (not rotations)."""
    return "permutation" in subgroups(group, n) and isinstance(group.identity(n, ()), Monomial)


def _soft(scores: Tensor, odds: float) -> Relaxed:
    """A soft permutation. The temperature is that at which exp(score) of a score of 1 is odds · (n − 1)."""
    return soft(scores, 1 / max(1e-3, math.log1p(odds * (scores.shape[-1] - 1))))


def _instance_of(spec: Spec, rule: Shift) -> Instance:
    """The axis instance whose translations a rule describes."""
    return spec.instance(rule.axis.strip("*"), spec.tensors[rule.bias].index)


def _zeros(spec: Spec, rule: Shift, dtype: torch.dtype, device: str) -> Tensor:
    return torch.zeros(spec.tensors[rule.bias].layout.shape(spec.sizes), dtype=dtype, device=device)


def _part(spec: Spec, rule: Shift, whole: Tensor) -> Tensor:
    """The view of the part of a bias that a rule translates."""
    return spec.part(rule.bias, whole, rule.axis).view
