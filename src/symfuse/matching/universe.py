"""Many models without an anchor: all are moved onto their running mean, until it settles (generalised Procrustes,
Gower 1975; for networks Crisostomi et al. 2024, C²M³). Going from one model to another through the mean is consistent
along every cycle by construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.architectures import Model
from symfuse.errors import OptionError
from symfuse.io import Checkpoint
from symfuse.matching.anchor import nearest_to_mean
from symfuse.matching.auto import auto_axes
from symfuse.matching.axes import AUTO
from symfuse.matching.coordinate import match_models

ROUNDS = 10
SETTLED = 1e-3  # rounds end when one lowers the spread by less than this share


@dataclass(frozen=True)
class Universe:
    """alignments: one for each model. curve: the sum of squared distances to the mean, before and after each round."""

    alignments: tuple[Alignment, ...]
    curve: tuple[float, ...]


def match_universe(models: Sequence[Model], *, rounds: int = ROUNDS, **options: Any) -> Universe:
    """Alignments that move all models towards their mean. options: those of `match_models`.

    First all are matched to the one nearest to the mean; then each to the mean of all, which is formed anew after each
    round. A round that raises the spread is taken back. The means are kept in memory, in float32 at least.
    """
    if len(models) < 2 or rounds < 1:
        raise OptionError(
            f"{len(models)} models and {rounds} rounds; a universe needs two models and one round at least"
        )
    options["axes"] = auto_axes(options.get("axes", AUTO), models)[0]  # the same for all, whatever the mean
    anchor = models[nearest_to_mean(models)]
    found = [match_models(model, anchor, **options) for model in models]  # the anchor's is that of its frame
    plain = [Alignment(g.spec, {}, frame=g.frame, variants=g.variants) for g in found]
    curve = [_spread(_moved(models, plain)), _spread(_moved(models, found))]
    options = options | {"starts": 1}
    for _ in range(rounds):
        moved = _moved(models, found)
        mean = Model.of(Checkpoint(_mean(moved), moved[0].config, name="the mean"))
        more = [match_models(Model.of(m), mean, **options) @ g for m, g in zip(moved, found, strict=True)]
        spread = _spread(_moved(models, more))
        if spread > curve[-1]:
            break
        gain, found = curve[-1] - spread, more
        curve.append(spread)
        if gain <= SETTLED * spread:
            break
    return Universe(tuple(found), tuple(curve))


def _moved(models: Sequence[Model], alignments: Sequence[Alignment]) -> list[Checkpoint]:
    return [alignment(model.checkpoint) for model, alignment in zip(models, alignments, strict=True)]


def _mean(models: Sequence[Checkpoint]) -> Mapping[str, Tensor]:
    return {name: torch.stack([model.read(name) for model in models]).mean(0) for name in _shared(models)}


def _spread(models: Sequence[Checkpoint]) -> float:
    total = 0.0
    for name in _shared(models):
        stack = torch.stack([model.read(name).double() for model in models])
        total += float((stack - stack.mean(0)).square().sum())
    return total


def _shared(models: Sequence[Checkpoint]) -> list[str]:
    """The names that all have; heads of one kind only are no part of the spread."""
    first = models[0]
    return [n for n in first if all(n in m and m.info(n).shape == first.info(n).shape for m in models)]
