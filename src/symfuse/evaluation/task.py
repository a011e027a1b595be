"""Tasks: batches that never change, and a loss and metrics that add up over them.

A `Task` is a callable from a live module to a `Score`; any other callable of that kind can be used instead (`Loss`).
"""

from __future__ import annotations

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from symfuse.errors import OptionError

Batch = Mapping[str, Tensor]
T = TypeVar("T", bound="Task")


@dataclass(frozen=True)
class Score:
    """loss: the mean in nats over `count` tokens or examples (0: not known). metrics: such as accuracy, in [0, 1]."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    count: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Totals:
    """Of one batch: the sum of the losses (a scalar, with its graph), over how many, and the sums of metrics."""

    loss: Tensor
    count: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def mean(totals: Iterable[Totals]) -> Score:
    """Weighted by what was counted: tokens or examples, not batches."""
    losses: list[float] = []
    metrics: Counter[str] = Counter()
    count = 0
    for one in totals:
        losses.append(one.loss.item())
        metrics.update(one.metrics)
        count += one.count
    return Score(math.fsum(losses) / count, {name: value / count for name, value in metrics.items()}, count)


Loss = Callable[[nn.Module], Score | Tensor | float]


class Task(ABC):
    """Fixed batches with a loss. auto: the `transformers` class that builds the module, such as AutoModelForMaskedLM.

    options: the options of tasks that read rows, with their defaults.
    batches: what the module takes by name, and `labels` where the loss has any. source: where the data come from.
    """

    name: ClassVar[str]
    auto: ClassVar[str]
    options: ClassVar[Mapping[str, Any]]

    def __init__(self, batches: Sequence[Batch], source: str = "memory") -> None:
        if not batches:
            raise OptionError(f"{self.name}: there are no batches to evaluate on")
        self.batches = tuple(batches)
        self.source = source

    @abstractmethod
    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        """Loss and metrics of one batch, summed; keeps the graph, so that gradients can be taken."""

    def __call__(self, module: nn.Module) -> Score:
        return mean(self.totals(module, batch) for batch in self.batches)

    def part(self: T, batches: Sequence[Batch]) -> T:
        """The same task on some of its batches."""
        result = copy.copy(self)
        result.batches = tuple(batches)
        return result

    def describe(self) -> dict[str, Any]:
        """Name, data and a digest of every number in the batches: scores are comparable if these are equal."""
        digest = hashlib.sha256()
        for batch in self.batches:
            for name, tensor in sorted(batch.items()):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        return {"task": self.name, "data": self.source, "batches": len(self.batches), "sha256": digest.hexdigest()}


def describe(loss: Loss) -> dict[str, Any]:
    """A description of a loss, for reports; of a callable that is not a Task only the name is known."""
    return loss.describe() if isinstance(loss, Task) else {"task": getattr(loss, "__name__", type(loss).__name__)}


def measure(loss: Loss, module: nn.Module) -> Score:
    """The score of a module in evaluation mode, without gradients and with fixed random numbers: the same each time.

    The module's mode and the caller's random state are restored. OptionError if the loss returns neither a Score nor
    one number.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            result = loss(module)
    finally:
        for part, training in modes:
            part.training = training
    if isinstance(result, Score):
        return result
    if isinstance(result, Tensor) and result.numel() == 1:
        return Score(result.item())
    if isinstance(result, int | float):
        return Score(float(result))
    raise OptionError(
        f"the loss gave {type(result).__name__}; expected a symfuse Score, or one number as float or tensor"
    )
