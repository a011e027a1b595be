"""What is descended at a point between models: the loss of a task, or how far its predictions are from theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.evaluate import Batch, Task
from symfuse.evaluate.tasks.base import IGNORED, classified
from symfuse.evaluate.tasks.predicting import Predicting
from symfuse.learning.path import Path, Weights, corners

KEPT = 2**30  # bytes of predictions


@dataclass(frozen=True)
class Objective:
    """(1 − distil) · loss + distil · KL(Σ wᵢ pᵢ ‖ q), with q what the point Σ wᵢ θᵢ predicts and pᵢ what the models
    predict (Hinton et al. 2015), which no element of theirs changes: kept for each batch as far as KEPT goes.
    Without labels, distil is 1.
    """

    path: Path
    task: Task
    distil: float
    taught: dict[int, list[Tensor]] = field(default_factory=dict)

    def __call__(self, moved: Sequence[Weights], weights: Sequence[float], batch: Batch) -> tuple[Tensor, int]:
        """The sum over what a batch asks for, with its graph, and how much that is."""
        if self.distil == 0:
            found = self.path.at(moved, weights, self.task.totals, batch)
            return found.loss, found.count
        logits, labels = self._predicted(moved, weights, batch)
        target = torch.stack([w * p for w, p in zip(weights, self._taught(batch), strict=True)]).sum(0)
        divergence = torch.nn.functional.kl_div(logits.log_softmax(-1), target, reduction="sum")
        if self.distil == 1:
            return divergence, len(labels)
        return (1 - self.distil) * classified(logits, labels).loss + self.distil * divergence, len(labels)

    @torch.no_grad()
    def _taught(self, batch: Batch) -> list[Tensor]:
        """What each model predicts, as it was before it was moved."""
        if (kept := self.taught.get(id(batch))) is not None:
            return kept
        ends = corners(len(self.path.latents))
        found = [self._predicted(self.path.tensors, end, batch)[0].softmax(-1) for end in ends]
        held = sum(p.nbytes for known in self.taught.values() for p in known)
        if held + sum(p.nbytes for p in found) <= KEPT:
            self.taught[id(batch)] = found
        return found

    def _predicted(
        self, moved: Sequence[Weights], weights: Sequence[float], batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Logits [positions, classes] and labels of what is asked for; OptionError for a task without classes."""
        if not isinstance(self.task, Predicting):
            raise OptionError(
                f"learning: {self.task.name} predicts no classes, so the models' predictions cannot teach; leave "
                "distil at 0"
            )
        logits, labels = self.path.at(moved, weights, self.task.predicted, batch)
        kept = labels != IGNORED
        return logits[kept], labels[kept]
