"""What methods that look at data share: what they are given, and what they find out before tensors are combined."""

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

# Told of what is being done: a line, and how far it is.
Report = Callable[[str], None]
# Statistics of a model on a task; `scratch`, a folder that they may wait in.
Collect = Callable[..., Statistics]


@dataclass(frozen=True)
class Inputs:
    """What a method learns from. models: those that are merged, in one frame, as they will be; base: what task vectors
    start from, if the method has one apart. tasks, statistics: the data of each model, and what was saved of them.
    own_heads: whether each model keeps its task head beside the merged body, on its own data; else heads are merged.
    seed: of what is drawn. memory: bytes that statistics may take while they are summed; None: as many as need be.
    device: where models are run, and what is found is computed. report: where progress is told."""

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
        found = self.tasks[model] if self.tasks else None
        if found is None:
            raise OptionError(
                f"{self.models[model].name}: this method looks at data, and none are given: data: FILE in a recipe "
                "(for all models, or beside one), --data FILE, or data=[task, …]"
            )
        return found

    def predicting(self, model: int) -> Predicting:
        """The data of a model, of a task that predicts classes; OptionError if it is another."""
        found = self.task(model)
        if not isinstance(found, Predicting):
            raise OptionError(
                f"{found.name} on {found.source}: this method needs a task that predicts classes, of texts, images or "
                "tokens; name one (--task)"
            )
        return found

    def saved(self, model: int) -> Statistics | None:
        """What was saved of a model's data."""
        return self.statistics[model] if self.statistics else None


@dataclass(frozen=True)
class Learned:
    """What was found out. weights: of a model, by its number among `Inputs.models`, for a tensor, by its canonical
    name: the value of `parameter`, where none is given, or the method ignores what is. statistics: of each model.
    moved: the models, if they were changed. record: for the run's document; summary: of it, in a line. notes: what the
    user should be told."""

    weights: Callable[[int, str], float | None] | None = None
    parameter: str = "weight"
    statistics: tuple[Statistics | None, ...] = ()
    moved: tuple[Model, ...] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""
    notes: tuple[str, ...] = ()


def statistics_of(inputs: Inputs, what: str, task_of: Callable[[int], Task], collect: Collect) -> list[Statistics]:
    """Of each model what was saved, or what is collected on its data into a temporary folder. what: for reports."""
    found = []
    for i, model in enumerate(inputs.models):
        if (statistics := inputs.saved(i)) is None:
            task = task_of(i)
            inputs.report(f"{what} of {model.name} on {task.source}")
            statistics = in_scratch(partial(collect, model, task, device=inputs.device))
        found.append(statistics)
    return found


def examples_of(inputs: Inputs, found: Sequence[Statistics]) -> str:
    """What statistics are of, in a line."""
    said = ", ".join(f"{m.name} {s.count}" for m, s in zip(inputs.models, found, strict=True))
    return f"examples looked at: {said}"


def in_scratch(collect: Collect) -> Statistics:
    """Statistics collected into a temporary folder (`scratch=`), which goes when nobody reads them any more."""
    folder = Path(tempfile.mkdtemp(prefix="symfuse-"))
    try:
        found = collect(scratch=folder)
    except BaseException:
        shutil.rmtree(folder)
        raise
    weakref.finalize(found, shutil.rmtree, folder, ignore_errors=True)
    return found


@contextmanager
def running(
    models: Sequence[Model], task: Task, dtype: torch.dtype = torch.float32, *, device: str = CPU
) -> Iterator[Any]:
    """A `WeightSpace` of models with the module that a task calls for, on the device; models that are computed (aligned
    ones) are in files while it is open."""
    with tempfile.TemporaryDirectory(prefix="symfuse-") as scratch:
        checkpoints = [model.checkpoint for model in models]
        yield open_space(checkpoints, [model.name for model in models], task, Path(scratch), None, dtype, device)
