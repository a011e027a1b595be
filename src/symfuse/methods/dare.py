"""Task vectors from which entries are dropped at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from symfuse.merging.base import Merge, PerModel
from symfuse.merging.stream import Block, Stream
from symfuse.methods.parts.sparsify import Sparsifier, as_factors
from symfuse.methods.parts.task_vectors import combined
from symfuse.methods.registry import method

PAPER = "Yu et al. 2024, Language models are super Mario, arXiv 2311.03099"
STEPS = 2**16  # probabilities are multiples of 1 / STEPS
Steps = np.ndarray[tuple[int], np.dtype[np.uint16]]


def _dare(*, vote: bool) -> Merge:
    def merge(
        stream: Stream,
        *,
        weight: PerModel = (1.0,),
        density: PerModel = (1.0,),
        normalize: bool = False,
        rescale: bool = True,
        lambda_: float = 1.0,
        int8_mask: bool = False,  # noqa: ARG001
    ) -> Iterator[Tensor]:
        """Each entry of a task vector is kept with probability `density`, and divided by it if `rescale` (`Drop`); the
        vectors are weighted and summed (see `combined`)."""
        drop = partial(Drop, rescale=rescale)
        return combined(stream, weight, density, drop, vote=vote, normalize=normalize, scale=lambda_)

    return merge


class Randomly(Sparsifier):
    """Drops entries by random numbers, which depend on the stream's seed, the names of tensor and model, and the
    stretch."""

    def __init__(self, stream: Stream, rescale: bool) -> None:
        self._stream = stream
        self._rescale = rescale
        self._drawn: dict[int, tuple[int, Steps]] = {}  # the stretch of each model's last block

    def random(self, model: int, block: Block) -> Steps:
        """Whole numbers, uniform from 0 to STEPS - 1, for the elements of a block."""
        start, stop = self._stream.span(block.index)
        if self._drawn.get(model, (-1,))[0] != block.index:
            self._drawn[model] = (block.index, random_steps(self._stream.random_seed(model, block.index), stop - start))
        first = block.first - start
        return self._drawn[model][1][first : first + block.tensors[model].numel()]


class Drop(Randomly):
    """Keeps each entry with probability p, the density rounded to a multiple of 1 / STEPS, not to zero.

    rescale: kept entries are divided by p, so that the expectation is the entry (the paper's rescaling; other tools use
    a ratio of norms of the whole tensor instead).
    """

    def __init__(self, stream: Stream, densities: Sequence[float], rescale: bool) -> None:
        super().__init__(stream, rescale)
        self._steps = [max(1, round(density * STEPS)) for density in densities]

    def __call__(self, model: int, block: Block, delta: Tensor) -> Tensor:
        steps = self._steps[model]
        if steps == STEPS:
            return delta
        kept = torch.from_numpy(self.random(model, block) < steps).reshape(delta.shape)
        delta.mul_(as_factors(kept.to(delta.device), delta.dtype))
        return delta.mul_(STEPS / steps) if self._rescale else delta


def random_steps(seed: int, count: int) -> Steps:
    """Whole numbers, uniform from 0 to STEPS - 1: the raw bits of a generator, which numpy promises not to change."""
    raw = np.random.SFC64(seed).random_raw(-(-count // 4))
    return raw.astype("<u8", copy=False).view("<u2")[:count]


dare_linear = method("dare_linear", label="DARE", paper=PAPER, base="required")(_dare(vote=False))
method("dare_ties", label="DARE with TIES", paper=PAPER, base="required")(_dare(vote=True))
