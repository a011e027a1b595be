"""What methods that use data share: their inputs, and their results before tensors are combined."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from symfuse.device import CPU
from symfuse.errors import OptionError
from symfuse.evaluation import Task, open_space
from symfuse.evaluation.tasks.base import Predicting
from symfuse.model import Model
from symfuse.stats.statistics import Statistics

# Called with a line that describes the current work, and its progress.
Report = Callable[[str], None]
# Statistics of a model on a task; `scratch`, a folder in which they may be stored.
Collect = Callable[..., Statistics]


@dataclass(frozen=True)
class Inputs:
    """The input of a method's `learn`. models: those that are merged, in one frame, as they will be; base: the origin
    of task vectors, if the method has a separate one. tasks, statistics: the data of each model, and its saved
    statistics. own_heads: whether each model keeps its task head on the merged body, for its own data; else heads are
    merged. seed: of random numbers. memory: bytes for statistics while they are summed; None: no limit. device: where
    models are run, and results are computed. report: called with a line of progress."""

    models: tuple[Model, ...]
    base: Model | None = None
    tasks: tuple[Task | None, ...] = ()
    statistics: tuple[Statistics | None, ...] = ()
    own_heads: bool = False
    seed: int = 0
    memory: int | None = None
    device: str = CPU
    report: Report = lambda _line: None

    def task(self, model: int) -> Task:
        """The data of a model; OptionError if it has none."""
        task = self.tasks[model] if self.tasks else None
        if task is None:
            raise OptionError(
                f"{self.models[model].name}: this method needs data, and there are none: write data: FILE in a recipe "
                "(for all models, or for one), --data FILE, or data=[task, …]"
            )
        return task

    def predicting(self, model: int) -> Predicting:
        """The data of a model, for methods that need a task with classes; OptionError if it has none."""
        task = self.task(model)
        if not isinstance(task, Predicting):
            raise OptionError(
                f"{task.name} on {task.source}: this method needs a task that predicts classes, of texts, images or "
                "tokens; name one (--task)"
            )
        return task

    def saved(self, model: int) -> Statistics | None:
        """The saved statistics of a model."""
        return self.statistics[model] if self.statistics else None


@dataclass(frozen=True)
class Learned:
    """What a method learned. weights: the value of `parameter` for a model (its index in `Inputs.models`) and a tensor
    (its canonical name), used if the user sets none or the method ignores it. statistics: of each model. models: if
    they were changed. record: for the run's document. summary: the record in a line. notes: for the user."""

    weights: Callable[[int, str], float | None] | None = None
    parameter: str = "weight"
    statistics: tuple[Statistics | None, ...] = ()
    models: tuple[Model, ...] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""
    notes: tuple[str, ...] = ()


def statistics_of(inputs: Inputs, what: str, task_of: Callable[[int], Task], collect: Collect) -> list[Statistics]:
    """For each model the saved statistics, or new ones, collected on its data into a temporary folder. what: for
    reports."""
    out = []
    for i, model in enumerate(inputs.models):
        if (statistics := inputs.saved(i)) is None:
            task = task_of(i)
            inputs.report(f"{what} of {model.name} on {task.source}")
            statistics = in_scratch(partial(collect, model, task, device=inputs.device))
        out.append(statistics)
    return out


def examples_of(inputs: Inputs, statistics: Sequence[Statistics]) -> str:
    """The number of examples of each model's statistics, in a line."""
    counts = ", ".join(f"{m.name} {s.count}" for m, s in zip(inputs.models, statistics, strict=True))
    return f"examples used: {counts}"


def in_scratch(collect: Collect) -> Statistics:
    """Statistics collected into a temporary folder (`scratch=`), which is deleted when they are no longer used."""
    folder = Path(tempfile.mkdtemp(prefix="symfuse-"))
    try:
        statistics = collect(scratch=folder)
    except BaseException:
        shutil.rmtree(folder)
        raise
    weakref.finalize(statistics, shutil.rmtree, folder, ignore_errors=True)
    return statistics


@contextmanager
def running(
    models: Sequence[Model], task: Task, dtype: torch.dtype = torch.float32, *, device: str = CPU
) -> Iterator[Any]:
    """A `WeightSpace` of models with the module that a task needs, on the device; computed models (aligned ones) are
    stored in files while it is open."""
    with tempfile.TemporaryDirectory(prefix="symfuse-") as scratch:
        checkpoints = [model.checkpoint for model in models]
        yield open_space(checkpoints, [model.name for model in models], task, Path(scratch), None, dtype, device)
