"""Many models without an anchor: all are aligned with their mean, in rounds until it no longer changes (generalised
Procrustes, Gower 1975; for networks Crisostomi et al. 2024, C²M³). Maps from one model to another through the mean are
consistent along every cycle by construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symfuse.alignment import Alignment
from symfuse.device import CPU
from symfuse.errors import OptionError
from symfuse.io import Checkpoint
from symfuse.matching.axes import AUTO
from symfuse.matching.coordinate import match_models
from symfuse.matching.problem import usual
from symfuse.model import Model, require_same_shape

ROUNDS = 10
SETTLED = 1e-3  # rounds end when one lowers the spread by less than this share


def nearest_to_mean(models: Sequence[Model]) -> int:
    """The index of the model with the least Euclidean distance to the mean, over all tensors but heads and ties, which
    are read one at a time.

    Two models are equally near; then it is the last, so that `merge A B` aligns A with B.
    """
    require_same_shape(models)
    spec = models[0].spec
    squares = torch.zeros(len(models), dtype=torch.float64, device=models[0].checkpoint.device)
    for name in spec.tensors:
        if name in spec.heads or name in spec.tied:
            continue
        stack = torch.stack([model.read(name).double().flatten() for model in models])
        squares += torch.linalg.vecdot(gap := stack - stack.mean(0), gap)
    nearest = squares <= squares.min() * (1 + 1e-9)
    return int(nearest.nonzero().max())


@dataclass(frozen=True)
class Universe:
    """alignments: one for each model. curve: the sum of squared distances to the mean, before and after each round."""

    alignments: tuple[Alignment, ...]
    curve: tuple[float, ...]


def match_universe(models: Sequence[Model], *, rounds: int = ROUNDS, **options: Any) -> Universe:
    """Alignments that move all models towards their mean. options: those of `match_models`.

    First all are matched to the one nearest to the mean; then, in each round, each to the mean of all aligned models. A
    round that raises the spread is discarded, and is the last. The mean is kept in the processor's memory, in float32
    at least.
    """
    if len(models) < 2 or rounds < 1:
        raise OptionError(
            f"{len(models)} models and {rounds} rounds; a universe needs two models and one round at least"
        )
    models = [model.on(options.get("device", CPU)) for model in models]
    asked = (options.get("axes", AUTO), options.get("groups"), options.get("frame"), options.get("variants", ()))
    options["axes"], options["frame"], _ = usual(models, *asked)  # once, not again for each mean
    anchor = models[nearest_to_mean(models)]
    alignments = [match_models(model, anchor, **options) for model in models]  # the anchor's has no elements
    plain = [Alignment(g.spec, {}, frame=g.frame, variants=g.variants) for g in alignments]
    curve = [spread(_aligned(models, plain)), spread(_aligned(models, alignments))]
    options = options | {"starts": 1}
    for _ in range(rounds):
        aligned = _aligned(models, alignments)
        mean = _mean(aligned)
        more = [match_models(model, mean, **options) @ g for model, g in zip(aligned, alignments, strict=True)]
        left = spread(_aligned(models, more))
        if left > curve[-1]:
            break
        gain, alignments = curve[-1] - left, more
        curve.append(left)
        if gain <= SETTLED * left:
            break
    return Universe(tuple(alignments), tuple(curve))


def _aligned(models: Sequence[Model], alignments: Sequence[Alignment]) -> list[Model]:
    return [Model.of(alignment(model.checkpoint)) for model, alignment in zip(models, alignments, strict=True)]


def _mean(models: Sequence[Model]) -> Model:
    """The mean of the tensors that all models have, with the heads of the first."""
    first, *others = models
    tensors = {}
    for name in first.spec.tensors:
        file = first.spec.file_name(name)
        if file in first.whole:
            also = [other for other in others if _has(first, name, other)]
            tensors[file] = torch.stack([model.read(name) for model in (first, *also)]).mean(0).cpu()
    return Model.of(Checkpoint(tensors, first.checkpoint.config, name="the mean"))


def spread(models: Sequence[Model]) -> float:
    """The sum of squared distances to the mean, over the tensors that all models have."""
    first, *others = models
    total = 0.0
    for name in first.spec.tensors:
        if all(_has(first, name, other) for other in others) and first.spec.file_name(name) in first.whole:
            stack = torch.stack([model.read(name).double() for model in models])
            total += float((stack - stack.mean(0)).square().sum())
    return total


def _has(first: Model, name: str, other: Model) -> bool:
    """Whether the other model has that tensor too. Only heads of one kind have a mean."""
    return first.spec.shares(name, other.spec) and other.spec.file_name(name) in other.whole
