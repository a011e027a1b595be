"""The objective at a point between models: the loss of a task, the distance of its predictions from those of the
models, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from symfuse.errors import IncompatibleError, OptionError
from symfuse.evaluation import Batch, Task
from symfuse.evaluation.tasks.base import IGNORED, Predicting, classified
from symfuse.matching.learned.path import Path, Weights, corners

KEPT = 2**30  # bytes of the models' predictions that are cached


@dataclass(frozen=True)
class Objective:
    """(1 − distil) · loss + distil · KL(Σ wᵢ pᵢ ‖ q), where q are the predictions at the point Σ wᵢ θᵢ and pᵢ those of
    model i (Hinton et al. 2015). Exact elements do not change pᵢ, so they are cached, up to KEPT bytes. With distil 1
    labels are not used. With a teacher (a module, or the number of a model) its predictions replace Σ wᵢ pᵢ.
    """

    path: Path
    task: Task
    distil: float
    teacher: int | nn.Module | None = None
    taught: dict[int, list[Tensor]] = field(default_factory=dict)

    def __call__(self, models: Sequence[Weights], weights: Sequence[float], batch: Batch) -> tuple[Tensor, int]:
        """The sum of the objective over the predictions that the task counts, with its graph, and their number."""
        if self.distil == 0:
            totals = self.path.at(models, weights, self.task.totals, batch)
            return totals.loss, totals.count
        logits, labels = self._predicted(models, weights, batch)
        shares = weights if self.teacher is None else [1.0]
        target = torch.stack([w * p for w, p in zip(shares, self._taught(batch), strict=True)]).sum(0)
        if target.shape != logits.shape:
            raise IncompatibleError(
                f"learning: the teacher predicts {target.shape[-1]} classes, and the models {logits.shape[-1]}; take a "
                "teacher with the same head"
            )
        divergence = torch.nn.functional.kl_div(logits.log_softmax(-1), target, reduction="sum")
        if self.distil == 1:
            return divergence, len(labels)
        return (1 - self.distil) * classified(logits, labels).loss + self.distil * divergence, len(labels)

    @torch.no_grad()
    def _taught(self, batch: Batch) -> list[Tensor]:
        """The predictions of each model before it is aligned, or those of the teacher."""
        if (kept := self.taught.get(id(batch))) is not None:
            return kept
        ends = corners(len(self.path.latents))
        if isinstance(self.teacher, nn.Module):
            predictions = [self._asked(*self._predicting.predicted(self.teacher, batch))[0].softmax(-1)]
        else:
            ends = ends if self.teacher is None else [ends[self.teacher]]
            predictions = [self._predicted(self.path.tensors, end, batch)[0].softmax(-1) for end in ends]
        held = sum(p.nbytes for known in self.taught.values() for p in known)
        if held + sum(p.nbytes for p in predictions) <= KEPT:
            self.taught[id(batch)] = predictions
        return predictions

    @property
    def _predicting(self) -> Predicting:
        """OptionError for a task without classes."""
        if not isinstance(self.task, Predicting):
            raise OptionError(
                f"learning: {self.task.name} predicts no classes, so the models' predictions cannot teach; leave "
                "distil at 0"
            )
        return self.task

    def _predicted(
        self, models: Sequence[Weights], weights: Sequence[float], batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Logits [positions, classes] and labels, at a point between the models, where there is a label."""
        return self._asked(*self.path.at(models, weights, self._predicting.predicted, batch))

    @staticmethod
    def _asked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        kept = labels != IGNORED
        return logits[kept], labels[kept]
