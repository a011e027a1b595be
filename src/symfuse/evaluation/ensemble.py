"""The ensemble of models: the mean of their predictions, as a reference for their merge."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from symfuse.errors import IncompatibleError, OptionError
from symfuse.evaluation.task import Loss, Score, mean, measure
from symfuse.evaluation.tasks.base import IGNORED, Predicting, classified
from symfuse.evaluation.weights import Build, name_of, open_space
from symfuse.io import Checkpoint
from symfuse.io.live import module_config
from symfuse.model.config import label_clash


def ensemble(
    sources: Sequence[Checkpoint | nn.Module],
    task: Loss,
    *,
    of: Literal["probabilities", "logits"] = "probabilities",
    build: Build | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> Score:
    """The score of the mean of the models' predictions on the same batches: the loss is −log of the mean probability.

    of: take the mean of the logits instead, and the probabilities of that. Memory: one live module,
    and one number (4 bytes; 8 in float64) for each class of each prediction, for any number of models. Models may be of
    different families if they accept the same batches. Raises OptionError if the task predicts no classes,
    IncompatibleError if the models have different classes, or the same in another order.
    """
    if not isinstance(task, Predicting):
        raise OptionError("an ensemble is made of predicted classes, and this task has none; choose a task that has")
    if of not in ("probabilities", "logits"):
        raise OptionError(f"an ensemble is the mean of probabilities or logits, not of {of!r}")
    if not sources:
        raise OptionError("an ensemble needs models; none are given")
    _require_same_order(sources)
    sums: list[Tensor] = []
    labels: list[Tensor] = []
    for source in sources:
        result, labels = _predicted(source, task, build, dtype, device)
        if of == "probabilities":
            result = [logits.log_softmax(-1) for logits in result]
        if sums and (before := sums[0].shape[-1]) != (now := result[0].shape[-1]):
            raise IncompatibleError(
                f"{name_of(sources[0])} and {name_of(source)}: one tells {before} classes apart, the other {now}; an "
                "ensemble needs models of the same classes"
            )
        # The sum of probabilities by their logarithms, so that small ones are not lost.
        join = torch.logaddexp if of == "probabilities" else torch.add
        sums = [join(a, b) for a, b in zip(sums, result, strict=True)] if sums else result
    # Cross entropy divides probabilities by their sum.
    means = sums if of == "probabilities" else [total / len(sources) for total in sums]
    return mean(classified(logits, wanted) for logits, wanted in zip(means, labels, strict=True))


def _predicted(
    source: Checkpoint | nn.Module, task: Predicting, build: Build | None, dtype: torch.dtype, device: str | None
) -> tuple[list[Tensor], list[Tensor]]:
    """For one model, the requested logits [predictions, classes], by batch, and their labels."""
    logits, labels = [], []

    def collect(module: nn.Module) -> float:
        for batch in task.batches:
            result, wanted = task.predicted(module, batch)
            if wanted.is_floating_point():
                raise OptionError(f"{task.name} on {task.source}: one number is predicted, no class; so no ensemble")
            kept = wanted != IGNORED
            logits.append(result[kept].cpu())
            labels.append(wanted[kept].cpu())
        return 0.0

    with tempfile.TemporaryDirectory(prefix="symfuse-") as scratch:
        space = open_space([source], [name_of(source)], task, Path(scratch), build, dtype, device)
        measure(collect, space.set([1.0]))
    return logits, labels


def _require_same_order(sources: Sequence[Checkpoint | nn.Module]) -> None:
    """IncompatibleError if models have other labels, or the same in another order."""
    configs = [(s.config if isinstance(s, Checkpoint) else module_config(s)) or {} for s in sources]
    for source, config in zip(sources[1:], configs[1:], strict=True):
        if clash := label_clash(configs[0], config):
            raise IncompatibleError(
                f"{name_of(sources[0])} and {name_of(source)}: {clash}, so that the mean of their predictions is of "
                "different labels; bring the rows of one head and its config into the order of the other"
            )
