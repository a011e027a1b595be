"""Run a method's `learn`, for models that are numbered as the merge numbers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symfuse.device import CPU, require
from symfuse.errors import OptionError
from symfuse.evaluation import Task
from symfuse.merging import Method
from symfuse.merging.stream import Statistic
from symfuse.methods.data import Inputs, Learned, Report
from symfuse.model import Model
from symfuse.stats.statistics import Statistics


@dataclass(frozen=True)
class Fitted:
    """The result of a method's `learn`. models: of the merge, as the method changed them. numbers: the index in `learn`
    of each model that it learned from, by index in the merge. data: the task or the saved statistics of each, as JSON
    data."""

    models: tuple[Model, ...]
    numbers: Mapping[int, int]
    learned: Learned
    data: tuple[Mapping[str, Any] | None, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A description of what was learned, and from which data."""
        notes = {"notes": list(self.learned.notes)} if self.learned.notes else {}
        return {**self.learned.record, **notes, "data": [None if one is None else dict(one) for one in self.data]}

    def value(self, parameter: str, model: int, name: str) -> float | None:
        if self.learned.weights is None or model not in self.numbers or parameter != self.learned.parameter:
            return None
        return self.learned.weights(self.numbers[model], name)

    def statistic(self, model: int, name: str) -> Statistic | None:
        if not self.learned.statistics or model not in self.numbers:
            return None
        statistics = self.learned.statistics[self.numbers[model]]
        return None if statistics is None else statistics.of(name, self.models[model].spec)


def learn(
    method: Method,
    models: Sequence[Model],
    *,
    of: Sequence[int] | None = None,
    base: int | None = None,
    tasks: Sequence[Task | None] | None = None,
    statistics: Sequence[Statistics | None] | None = None,
    parameters: Mapping[str, Any] | None = None,
    heads: str = "average",
    seed: int = 0,
    memory: int | None = None,
    device: str = CPU,
    report: Report = lambda _line: None,
) -> Fitted | None:
    """The result of a method's `learn` on the data of models; None for a method without one.

    models: as they will be merged, in one frame. of: the numbers of those whose data it uses; default: all but the
    base. base: the number of the model from which task vectors start. tasks, statistics: for each of `of`. parameters:
    of the method; those of `learn` are selected. memory, device: as in `Inputs`. Raises OptionError for data that the
    method cannot use, too few of them, and parameters of the wrong type.
    """
    if method.learn is None:
        if any(source is not None for source in (*(tasks or ()), *(statistics or ()))):
            raise OptionError(f"{method.name} does not use data; leave data and statistics out")
        return None
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptionError(f"seed is {seed!r:.24}; expected a whole number")
    apart = base if method.base != "unused" else None
    numbers = [i for i in range(len(models)) if i != apart] if of is None else list(of)
    for what, listed in (("data", tasks), ("statistics", statistics)):
        if listed is not None and len(listed) not in (0, len(numbers)):
            raise OptionError(
                f"{len(listed)} {what} for {len(numbers)} models; give one for each, in the same order"
                + (", without the base" if apart is not None else "")
            )
    saved = tuple(statistics or ())
    if any(one is not None for one in saved) and method.statistics is None:
        raise OptionError(f"{method.name} does not use saved statistics; give it data")
    for i, one in zip(numbers, saved, strict=False):
        if one is not None:
            if one.kind != method.statistics:
                raise OptionError(f"{method.name} needs {method.statistics} statistics, and these are {one.kind}")
            one.fit(models[i])
    inputs = Inputs(
        models=tuple(models[i] for i in numbers),
        base=None if apart is None else models[apart],
        tasks=tuple(tasks or ()),
        statistics=saved,
        own_heads=heads != "average",
        seed=seed,
        memory=memory,
        device=require(device),
        report=report,
    )
    own = {name: value for name, value in (parameters or {}).items() if name in method.learned}
    learned: Learned = method.learn(inputs, **{n: method.learned[n].value(v, method.name) for n, v in own.items()})
    out = list(models)
    for i, model in zip(numbers, learned.models or (), strict=False):
        out[i] = model
    shown = [None if one is None else one.provenance for one in saved or [None] * len(numbers)]
    for i, task in enumerate(inputs.tasks):
        shown[i] = shown[i] if task is None or shown[i] is not None else task.describe()
    return Fitted(tuple(out), {number: i for i, number in enumerate(numbers)}, learned, tuple(shown))
