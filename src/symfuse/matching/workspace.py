"""The source in memory while it is transformed step by step, and the product of the elements so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from symfuse.alignment.apply import composed, move
from symfuse.device import CPU
from symfuse.groups import Element
from symfuse.spec import Instance, Spec

A = TypeVar("A")
B = TypeVar("B")


def each(pool: Executor | None, work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """The results of the work for all items, in threads of the pool; without a pool in this thread."""
    return list(map(work, items) if pool is None else pool.map(work, items))


@dataclass
class Workspace:
    """The source as transformed so far, in memory, and the elements that acted on it.

    changes: how often each tensor was changed. solved: the `version` of each block when it was last optimal.
    """

    spec: Spec
    tensors: dict[str, Tensor]
    elements: dict[Instance, Element] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    solved: dict[Instance, Sequence[int | None]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the tensors are; without any, the processor."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device(CPU))

    def touched(self, instance: Instance) -> list[str]:
        """The names of the tensors of this workspace on which an instance acts."""
        return [*filter(self.tensors.__contains__, self.spec.movable[instance])]

    def version(self, instance: Instance) -> Sequence[int | None]:
        """How often each tensor that it acts on was changed; None for never."""
        return [*map(self.changes.get, self.touched(instance))]

    def apply(self, instance: Instance, element: Element, pool: Executor | None = None) -> None:
        """Transform all tensors that the instance acts on, in threads of the pool if there is one."""
        by = {instance.axis: element}

        def one(name: str) -> None:
            self.tensors[name] = move(self.spec, by, name, self.tensors[name])
            self.changes[name] = self.changes.get(name, 0) + 1

        each(pool, one, self.touched(instance))
        self.then({instance: element})

    def then(self, elements: Mapping[Instance, Element]) -> None:
        """Record that these elements have acted too."""
        self.elements = composed(self.spec, elements, self.elements)

    def trial(self) -> Workspace:
        """A copy that can be changed independently."""
        return replace(self, tensors=dict(self.tensors), changes=dict(self.changes))

    def take(self, trial: Workspace) -> None:
        """Take over the state of a copy."""
        self.tensors, self.changes, self.elements = trial.tensors, trial.changes, trial.elements

    def part(self, instances: Sequence[Instance]) -> Workspace:
        """The tensors that some instances act on, with no elements yet."""
        names = dict.fromkeys(name for instance in instances for name in self.touched(instance))
        changes = {name: self.changes[name] for name in names if name in self.changes}
        solved = {instance: self.solved[instance] for instance in instances if instance in self.solved}
        return Workspace(self.spec, {name: self.tensors[name] for name in names}, {}, changes, solved)

    def join(self, parts: Sequence[Workspace]) -> None:
        """Take over parts that have no tensor in common."""
        elements: dict[Instance, Element] = {}
        for part in parts:
            self.tensors |= part.tensors
            self.changes |= part.changes
            self.solved |= part.solved
            elements |= part.elements
        self.then(elements)
