"""The greedy soup: models are added to the mean as long as it does not get worse on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from symfuse.errors import CheckpointError, OptionError
from symfuse.evaluation import Score, Task, measure
from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.messages import suggestion
from symfuse.methods.data import Inputs, Learned, running
from symfuse.methods.linear import linear
from symfuse.methods.registry import method


def learn(inputs: Inputs, *, metric: str = "accuracy") -> Learned:
    """Choose the models of the soup (Wortsman et al. 2022, arXiv 2203.05482, recipe 1): from the best to the worst on
    one validation set, each is added if the mean with it is at least as good as without. The first is always added, so
    the soup is never worse on these data than the best model.

    metric: of the task's score, higher is better, or "loss", lower is better. Equally good models are taken in the
    order of the list; a model that does not change the score is added. 2k − 1 evaluations of k models, in float32, one
    live module in memory.
    """
    if inputs.own_heads:
        raise OptionError("greedy_soup evaluates whole models with their heads: it needs `heads: average`")
    task = _validation(inputs)
    count = len(inputs.models)
    with running(inputs.models, task, device=inputs.device) as space:

        def judge(members: list[int], what: str) -> float:
            score = measure(task, space.set([1 / len(members) if i in members else 0.0 for i in range(count)]))
            value = _value(score, metric, task)
            inputs.report(f"greedy_soup: {what}, {metric} {abs(value):.4f}")
            return value

        alone = [judge([i], model.name) for i, model in enumerate(inputs.models)]
        order = sorted(range(count), key=lambda i: -alone[i])  # stable
        taken, best = [order[0]], alone[order[0]]
        if best == -math.inf:
            raise CheckpointError(f"no model has a finite {metric} on {task.source}; numbers may have overflowed")
        steps: list[dict[str, Any]] = [{"model": order[0], "alone": abs(best), "soup": abs(best), "taken": True}]
        for i in order[1:]:
            value = judge([*taken, i], f"with {inputs.models[i].name}")
            scores = {"alone": _finite(alone[i]), "soup": _finite(value)}
            steps.append({"model": i, **scores, "taken": value >= best})
            if value >= best:
                taken, best = [*taken, i], value
    share = 1 / len(taken)
    record = {"metric": metric, "data": task.describe(), "steps": steps}
    names = ", ".join(inputs.models[i].name for i in taken)
    return Learned(
        weights=lambda model, _name: share if model in taken else 0.0,
        record=record,
        summary=f"soup of {len(taken)} of {count}: {names}; {metric} {abs(best):.4f} on {task.source}",
    )


@method(
    "greedy_soup",
    label="Greedy soup",
    paper="Wortsman et al. 2022, Model soups, arXiv 2203.05482",
    learn=learn,
    ignored=("weight",),
)
def greedy_soup(stream: Stream, *, weight: PerModel = (1.0,)) -> Iterator[Tensor]:
    """Σ wᵢ θᵢ with the learned weights: the same for all models in the soup, else 0."""
    return linear(stream, weight=weight)


def _validation(inputs: Inputs) -> Task:
    """The one set of data on which all models are evaluated; OptionError if there are several."""
    task = inputs.task(0)
    ours = task.describe()
    for i, other in enumerate(inputs.tasks):
        if other is not None and other is not task and (theirs := other.describe()) != ours:
            raise OptionError(
                f"greedy_soup evaluates all models on the same data, and those of {inputs.models[i].name} "
                f"({theirs['task']} on {theirs['data']}) are not those of {inputs.models[0].name} ({ours['task']} on "
                f"{ours['data']}); give one validation set for all"
            )
    return task


def _value(score: Score, metric: str, task: Task) -> float:
    """The score, higher is better; −∞ if it, or the loss, is not finite: where outputs are NaN, accuracy means
    nothing."""
    known = {**score.metrics, "loss": -score.loss}
    if metric not in known:
        raise OptionError(
            f"greedy_soup: {task.name} has no metric {metric!r}{suggestion(metric, known)}; choose from "
            f"{', '.join(known)}"
        )
    return known[metric] if math.isfinite(known[metric]) and math.isfinite(score.loss) else -math.inf


def _finite(value: float) -> float | None:
    """The magnitude for the record, as JSON; None if it is not finite."""
    return abs(value) if math.isfinite(value) else None
