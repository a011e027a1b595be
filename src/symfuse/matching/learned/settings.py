"""The settings of a learned matching."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from symfuse.device import CPU, require
from symfuse.errors import OptionError
from symfuse.evaluation import Task
from symfuse.evaluation.weights import Build
from symfuse.io import Checkpoint

Permutations = Literal["kept", "straight-through", "annealed", "soft"]
PERMUTATIONS: tuple[Permutations, ...] = ("kept", "straight-through", "annealed", "soft")
# Numbers from 0, the most that they may be, and what is expected.
_SHARES = (
    ("rate", 10, "a number above 0, at most 10"),
    ("spread", 1, "0 (the middle only) to 1 (the whole path)"),
    ("distil", 1, "0 (labels only) to 1 (no labels)"),
)


@dataclass(frozen=True)
class Progress:
    """The progress of learning. loss: the mean on the path since the last report. barrier: on the validation data, the
    latest; best: the least so far; start: that of the matching from which it started."""

    step: int
    steps: int
    loss: float
    barrier: float
    best: float
    start: float


@dataclass(frozen=True)
class Learning:
    """How a matching is learned (Theus et al. 2025, Section 4.3).

    task: its batches are drawn in random order, and its loss is minimised at random points between the models.
    validation: the task on which the criterion of `keep` is measured; None: every fifth batch of `task`, which is then
    left out of learning. steps, rate: of AdamW, with a linear warm-up and half a cosine to 0. spread: the weights of k
    models are (1 − spread) / k + spread · w with w uniform on the simplex: of two models λ is uniform in [½ − spread /
    2, ½ + spread / 2], so 0.2 is the [0.4, 0.6] of the paper. distil: the share of the objective that is the KL
    divergence of the predictions at the point from the weighted mean of the models' predictions, or from those of the
    teacher; 1 needs no labels. teacher: one of the models by its number from 0 (of a pair 0 is the source, 1 the
    anchor), or another model: its folder, a checkpoint or a live module. permutations: those of the start are "kept";
    or learned "straight-through"; or as soft matrices that become hard ("annealed") or stay "soft", which is inexact.
    every: steps between two validations. keep: the criterion; the step with the least "barrier" is kept, or that with
    the least loss at the "midpoint" of the models, or at a point λ of the path from the anchor (0) to the source (1).
    patience: learning ends after so many validations in a row without a better one. points: inner points of the path at
    which barriers are measured. journal: a file from which a stopped run continues. device: of the computation. build:
    makes the module, for models that `transformers` does not have. progress: called after each validation.
    """

    task: Task
    validation: Task | None = None
    steps: int = 2000
    rate: float = 0.01
    spread: float = 0.8
    distil: float = 0.0
    teacher: int | str | os.PathLike[str] | Checkpoint | nn.Module | None = None
    permutations: Permutations = "kept"
    every: int = 100
    patience: int = 10
    points: int = 5
    keep: str | float = "barrier"
    seed: int = 0
    journal: Path | str | None = None
    device: str = CPU
    build: Build | None = None
    progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        for name, task in (("task", self.task), ("validation", self.validation)):
            if not isinstance(task, Task) and not (name == "validation" and task is None):
                raise OptionError(
                    f"learning: {name} is {task!r:.40}; expected a task, as symfuse.task(name, data, model) makes it"
                )
        if self.validation is not None and self.validation.name != self.task.name:
            raise OptionError(
                f"learning: the validation data are of {self.validation.name}, and what is learned on of "
                f"{self.task.name}; both must be of one task"
            )
        for name in ("steps", "every", "patience", "points", "seed"):
            value = getattr(self, name)
            if type(value) is not int or (name != "seed" and value < 1):
                raise OptionError(f"learning: {name} is {value!r:.40}; expected a whole number, 1 or more")
        for name, most, means in _SHARES:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= most or (name == "rate" and value == 0):
                raise OptionError(f"learning: {name} is {value!r:.40}; expected {means}")
        if not isinstance(self.journal, str | Path | None):
            raise OptionError(f"learning: journal is {self.journal!r:.40}; expected the path of a file")
        for name in ("build", "progress"):
            if not callable(getattr(self, name) or print):
                raise OptionError(f"learning: {name} is {getattr(self, name)!r:.40}; expected a function")
        number = isinstance(self.keep, int | float) and not isinstance(self.keep, bool)
        if self.keep not in ("barrier", "midpoint") and not (number and 0 <= float(self.keep) <= 1):
            raise OptionError(
                f'learning: keep is {self.keep!r:.40}; expected "barrier", "midpoint", or a point of the path, 0 to 1'
            )
        if not isinstance(self.teacher, int | str | os.PathLike | Checkpoint | nn.Module | None):
            raise OptionError(f"learning: teacher is {self.teacher!r:.40}; expected a model, or the number of one")
        if self.teacher is not None and self.distil == 0:
            raise OptionError("learning: nothing is learned from the teacher with distil 0; give distil, such as 0.5")
        if self.permutations not in PERMUTATIONS:
            raise OptionError(f"learning: permutations {self.permutations!r}; choose from {', '.join(PERMUTATIONS)}")
        try:
            require(self.device)
        except OptionError as error:
            raise OptionError(f"learning: {error}") from error
        if self.validation is None and len(self.task.batches) < 2:
            raise OptionError(
                f"learning: {self.task.source} is one batch, of which none can be held out to measure the barrier on; "
                "name validation data, or take smaller batches (batch_size)"
            )
