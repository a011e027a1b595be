"""Statistics of one model, of the kinds that methods read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from symfuse.errors import OptionError
from symfuse.evaluation import Task
from symfuse.evaluation.tasks.base import Predicting
from symfuse.messages import suggestion
from symfuse.methods.fisher import fisher_of
from symfuse.methods.regmean import gram_of
from symfuse.model import Model
from symfuse.stats.statistics import Statistics

KINDS: dict[str, Callable[..., Statistics]] = {"fisher": fisher_of, "gram": gram_of}


def collect(model: Model, task: Task, kind: str = "fisher", **options: Any) -> Statistics:
    """Statistics of a model on data. kind: "fisher" or "gram". options: of `fisher_of` and `gram_of`.

    Raises OptionError for unknown kinds and options, and for tasks that predict no classes ("fisher").
    """
    if kind not in KINDS:
        raise OptionError(f"there are no statistics {kind!r}{suggestion(kind, KINDS)}; choose from {', '.join(KINDS)}")
    known = list(inspect.signature(KINDS[kind]).parameters)[2:]
    for option in options:
        if option not in known:
            raise OptionError(f"{kind} has no option {option!r}{suggestion(option, known)}; it has {', '.join(known)}")
    for option in ("memory", "seed"):
        if not isinstance(options.get(option), int | None) or isinstance(options.get(option), bool):
            raise OptionError(f"{option} is {options[option]!r:.40}; expected a whole number")
    if kind == "fisher" and not isinstance(task, Predicting):
        raise OptionError(
            f"{task.name} on {task.source}: the Fisher information needs a task that predicts classes; name one"
        )
    return KINDS[kind](model, task, **options)
