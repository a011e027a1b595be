"""Task vectors from which entries are dropped at random, small ones more often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.base import Merge, PerModel
from symfuse.merging.stream import Block, Stream
from symfuse.methods.dare import STEPS, Randomly
from symfuse.methods.parts.sparsify import as_factors, per_model
from symfuse.methods.parts.task_vectors import combined
from symfuse.methods.registry import method

PAPER = "Deep et al. 2024, DELLA-Merging, arXiv 2406.11617"


def _della(*, vote: bool) -> Merge:
    def merge(
        stream: Stream,
        *,
        weight: PerModel = (1.0,),
        density: PerModel = (1.0,),
        epsilon: PerModel = (0.15,),
        normalize: bool = vote,
        rescale: bool = True,
        lambda_: float = 1.0,
        int8_mask: bool = False,  # noqa: ARG001
    ) -> Iterator[Tensor]:
        """Entries of a task vector are kept with probabilities that rise with their rank from density - epsilon to
        density + epsilon in each row, and divided by them if `rescale` (`RankedDrop`); the vectors are weighted and
        summed (see `combined`)."""
        drop = partial(RankedDrop, epsilon=epsilon, rescale=rescale)
        return combined(stream, weight, density, drop, vote=vote, normalize=normalize, scale=lambda_)

    return merge


class RankedDrop(Randomly):
    """Keeps the entry of rank r among the c of its row (0 for the smallest magnitude; the first of equal ones is the
    smaller) with probability density + epsilon·(2r/(c - 1) - 1), rounded to a multiple of 1 / STEPS, not to zero. The
    only entry of a row is kept with probability density. A vector is one row.

    rescale: an entry that is kept is divided by its own probability, so that its expectation is the entry (the paper's
    rescaling). OptionError if a probability would not lie between 0 and 1.
    """

    def __init__(self, stream: Stream, densities: Sequence[float], epsilon: Sequence[float], rescale: bool) -> None:
        super().__init__(stream, rescale)
        self._steps = []  # of each model, by rank
        rank = np.linspace(-1, 1, stream.columns) if stream.columns != 1 else np.zeros(1)
        for density, width in zip(densities, per_model(stream, "epsilon", epsilon, 0.0, 1.0), strict=True):
            if 0 < density < 1 and not 0 < density - width <= density + width < 1:
                raise OptionError(
                    f"{stream.name}: epsilon is {width} and density {density}, which gives probabilities from "
                    f"{density - width:g} to {density + width:g}, expected above 0 and below 1; take a smaller epsilon"
                )
            self._steps.append(np.maximum(1, np.rint((density + width * rank) * STEPS)))

    def __call__(self, model: int, block: Block, delta: Tensor) -> Tensor:
        steps = self._steps[model]
        random = self.random(model, block).reshape(delta.shape)
        by_rank = as_factors(torch.from_numpy(random < steps.astype(np.int32)), delta.dtype)
        if self._rescale:
            by_rank.mul_(torch.from_numpy(STEPS / steps))
        by_rank = by_rank.to(delta.device)
        return delta.mul_(torch.empty_like(by_rank).scatter_(1, ascending(delta.abs()), by_rank))


def ascending(values: Tensor) -> Tensor:
    """The stable argsort of each row of values that are not negative.

    float32 on the processor: sort integers that hold a value's bits and, below them, its position. No two are equal, so
    an unstable sort suffices, ten times as fast as one of indices.
    """
    if values.dtype != torch.float32 or not values.is_cpu:
        return values.argsort(dim=1, stable=True)
    keys = (values.view(torch.int32).long() << 32).add_(torch.arange(values.shape[1])).numpy()
    keys.sort(axis=1)
    return torch.from_numpy(keys).bitwise_and_(2**32 - 1)


method("della", label="DELLA", paper=PAPER, base="required")(_della(vote=True))
della_linear = method("della_linear", label="DELLA without a vote", paper=PAPER, base="required")(_della(vote=False))
