"""A source in memory that is moved step by step, and the alignment that its steps come to."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.device import CPU
from symfuse.groups import Element
from symfuse.spec import Instance, Spec


@dataclass
class Moved:
    """The source as moved so far, in memory, and the elements that moved it.

    moves: how often each tensor was moved. solved: of each block the moves of its tensors when it was at its best.
    """

    spec: Spec
    tensors: dict[str, Tensor]
    alignment: Alignment | None = None
    moves: dict[str, int] = field(default_factory=dict)
    solved: dict[Instance, Sequence[int]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the tensors are; without any, the processor."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device(CPU))

    def touched(self, instance: Instance) -> list[str]:
        """The names of the tensors, of those that are here, that an instance moves."""
        return [name for name in self.spec.movable[instance] if name in self.tensors]

    def version(self, instance: Instance) -> Sequence[int]:
        return [self.moves.get(name, 0) for name in self.touched(instance)]

    def apply(self, instance: Instance, element: Element, pool: Executor | None = None) -> None:
        """Move all that the instance touches: one tensor a thread of the pool, if there is one."""
        step = Alignment(self.spec, {instance: element})

        def one(name: str) -> None:
            self.tensors[name] = step.move(name, self.tensors[name])
            self.moves[name] = self.moves.get(name, 0) + 1

        list((map if pool is None else pool.map)(one, self.touched(instance)))
        self.then(step)

    def then(self, step: Alignment) -> None:
        self.alignment = step if self.alignment is None else step @ self.alignment

    def trial(self) -> Moved:
        """A copy, to be moved by itself."""
        return replace(self, tensors=dict(self.tensors), moves=dict(self.moves))

    def take(self, trial: Moved) -> None:
        """What became of a copy."""
        self.tensors, self.moves, self.alignment = trial.tensors, trial.moves, trial.alignment

    def part(self, instances: Sequence[Instance]) -> Moved:
        """The tensors that some instances touch, as nothing had moved them yet."""
        names = dict.fromkeys(name for instance in instances for name in self.touched(instance))
        moves = {name: self.moves[name] for name in names if name in self.moves}
        solved = {instance: self.solved[instance] for instance in instances if instance in self.solved}
        return Moved(self.spec, {name: self.tensors[name] for name in names}, None, moves, solved)

    def join(self, parts: Sequence[Moved]) -> None:
        """What became of parts that have no tensor in common."""
        elements: dict[Instance, Element] = {}
        for part in parts:
            self.tensors |= part.tensors
            self.moves |= part.moves
            self.solved |= part.solved
            elements |= {} if part.alignment is None else part.alignment.elements
        if elements:
            self.then(Alignment(self.spec, elements))
