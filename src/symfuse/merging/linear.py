"""The weighted sum of models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from symfuse.merging.base import PerModel, method
from symfuse.merging.stream import Stream
from symfuse.merging.weights import normalized


@method("linear", label="Linear", paper="Wortsman et al. 2022, Model soups, arXiv 2203.05482")
def linear(stream: Stream, *, weight: PerModel = (1.0,), normalize: bool = True) -> Iterator[Tensor]:
    """Σ wᵢ θᵢ, divided by Σ wᵢ if `normalize`. Where all models agree and the weights sum to one: the entry itself,
    without the sum's rounding. OptionError if weights that sum to zero are to be normalised."""
    shares = normalized(weight) if normalize else list(weight)
    convex = abs(sum(shares) - 1) <= 1e-12
    for block in stream:
        first = block.tensors[0]
        out = first * shares[0]
        for tensor, share in zip(block.tensors[1:], shares[1:], strict=True):
            out.add_(tensor, alpha=share)
        if convex and stream.count > 1:
            agree = first == block.tensors[1]
            for tensor in block.tensors[2:]:
                agree &= tensor == first
            out = torch.where(agree, first, out)
        yield out
