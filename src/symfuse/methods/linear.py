"""The weighted sum of models."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.parts.mean import mean, normalized, steps, sum_to_one
from symfuse.methods.registry import method


@method("linear", label="Linear", paper="Wortsman et al. 2022, Model soups, arXiv 2203.05482")
def linear(stream: Stream, *, weight: PerModel = (1.0,), normalize: bool = True) -> Iterator[Tensor]:
    """Σ wᵢ θᵢ, divided by Σ wᵢ if `normalize`. If the weights sum to one, an entry on which all models agree is kept
    exactly. OptionError for normalising weights that sum to zero."""
    shares = normalized(weight) if normalize else list(weight)
    if sum_to_one(shares):
        order = steps(shares)
        for block in stream:
            yield mean(block.tensors, order)
        return
    for block in stream:
        out = block.tensors[0].mul_(shares[0])
        for tensor, share in zip(block.tensors[1:], shares[1:], strict=True):
            out.add_(tensor, alpha=share)
        yield out
