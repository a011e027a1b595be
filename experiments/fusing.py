"""Merges of fine-tuned models as Zhang et al. compare them: four methods, with and without matching."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from families import held
from torch import Tensor, nn

import symfuse
from symfuse.evaluation import Task
from symfuse.evaluation.tasks.base import IGNORED, output_of
from symfuse.io import Checkpoint
from symfuse.stats.statistics import Statistics

# The options of `symfuse.match`, from the weights; none: the models as they are.
MATCHINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "attention": {"axes": "attention"},
    "feed-forward": {"axes": "ffn"},
    "both": {"axes": ("attention", "ffn")},
    "both, no scales": {"axes": ("attention", "ffn"), "scaling": False},
}
# A control: all models but the anchor are first moved by a random element of these axes, far from where they were,
# computing what they did; then matched, or not.
APART = {"apart": {}, "apart, both": MATCHINGS["both"]}
MOVED = ("qk", "v", "ffn")

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Member:
    """A model as it is merged. data: what it was trained on, for statistics. seconds: of matching it."""

    model: Checkpoint
    data: Task
    seconds: float = 0.0
    collected: dict[str, tuple[Statistics, float]] = field(default_factory=dict)

    def statistics(self, kind: str) -> tuple[Statistics, float]:
        """What a method reads, and the seconds that it took to collect, once."""
        if kind not in self.collected:
            self.collected[kind] = seconds(lambda: symfuse.collect(self.model, self.data, kind))
        return self.collected[kind]


@dataclass(frozen=True)
class Way:
    """How models are merged. method: its name in symfuse. statistics: the kind that it reads. transport: whether models
    are moved onto the last by optimal transport before. matchings: with which it is tried."""

    method: str
    statistics: str | None = None
    transport: bool = False
    matchings: tuple[str, ...] = (*MATCHINGS, *APART)

    def __call__(self, members: Sequence[Member]) -> Checkpoint:
        *models, anchor = [member.model for member in members]
        if self.transport:
            models = [symfuse.match(model, to=anchor, variants=["transport"])(model) for model in models]
        statistics_of = [member.statistics(self.statistics)[0] for member in members] if self.statistics else None
        return held(symfuse.merge([*models, anchor], method=self.method, statistics=statistics_of))

    def collecting(self, members: Sequence[Member]) -> float:
        """Seconds that the statistics of all took."""
        return sum(member.statistics(self.statistics)[1] for member in members) if self.statistics else 0.0


WAYS = {
    "simple": Way("linear"),
    "Fisher": Way("fisher", statistics="fisher"),
    "RegMean": Way("regmean", statistics="gram"),
    "OT": Way("linear", transport=True, matchings=("none", "both", *APART)),
}


def seconds(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and its processor time."""
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def probabilities(module: nn.Module, task: Task) -> Tensor:
    """[counted texts or words, classes]."""
    per_batch = []
    with torch.inference_mode():
        for batch in task.batches:
            logits = output_of(module, batch, "logits").cpu()
            per_batch.append(logits[batch["labels"] != IGNORED].softmax(-1))
    return torch.cat(per_batch)


def labels(task: Task) -> Tensor:
    return torch.cat([batch["labels"][batch["labels"] != IGNORED] for batch in task.batches])


def score(predicted: Tensor, truth: Tensor) -> dict[str, float]:
    """Accuracy; F1, the mean over the classes that occur; loss in nats."""
    classes = predicted.argmax(-1)
    f1 = []
    for label in truth.unique():
        hits = ((classes == label) & (truth == label)).sum()
        f1.append(float(2 * hits / ((classes == label).sum() + (truth == label).sum())))
    loss = nn.functional.nll_loss(predicted.clamp_min(1e-12).log(), truth)
    return {"accuracy": float((classes == truth).float().mean()), "f1": statistics.fmean(f1), "loss": float(loss)}
