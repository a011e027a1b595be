"""Federated averaging: models are weighted by the amount of data that they were trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from symfuse.errors import OptionError
from symfuse.evaluation import Task
from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.data import Inputs, Learned
from symfuse.methods.linear import linear
from symfuse.methods.parts.sparsify import per_model
from symfuse.methods.registry import method


def learn(inputs: Inputs) -> Learned:
    """The number of examples of each model's data; none if there are no data."""
    if not any(task is not None for task in inputs.tasks):
        return Learned(weights=lambda _model, _name: 0.0, parameter="samples")
    counts = [examples(inputs.task(i)) for i in range(len(inputs.models))]
    listed = ", ".join(f"{model.name} {count}" for model, count in zip(inputs.models, counts, strict=True))
    return Learned(
        weights=lambda model, _name: float(counts[model]),
        parameter="samples",
        record={"samples": counts},
        summary=f"examples: {listed}",
    )


@method(
    "fedavg",
    label="Federated averaging",
    paper="McMahan et al. 2017, Communication-efficient learning, arXiv 1602.05629",
    learn=learn,
    data_required=False,
    unlabelled=lambda _parameters: True,
)
def fedavg(stream: Stream, *, samples: PerModel = (1.0,)) -> Iterator[Tensor]:
    """Σ nᵢ θᵢ / Σ nᵢ (McMahan et al. 2017, algorithm 1).

    samples: nᵢ, by default the number of examples in the data. OptionError unless all are above zero.
    """
    counts = per_model(stream, "samples", samples, -math.inf, math.inf)
    if not any(counts):
        raise OptionError(
            "fedavg: the number of examples of each model is missing; set `samples` for each (--set, or the parameters "
            "of each model in a recipe), or give data, whose examples are counted"
        )
    for count, source in zip(counts, stream.sources, strict=True):
        if count <= 0:
            raise OptionError(f"fedavg: samples of {source.model or 'a model'} is {count:g}; expected a number above 0")
    return linear(stream, weight=counts)


def examples(task: Task) -> int:
    """The number of rows of the batches (a text is one row, however many tokens it has)."""
    return sum(len(next(iter(batch.values()))) for batch in task.batches)
