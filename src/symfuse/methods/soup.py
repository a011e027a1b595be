"""The plain mean of models."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from symfuse.merging.stream import Stream
from symfuse.methods.linear import linear
from symfuse.methods.registry import method


@method("soup", label="Uniform soup", paper="Wortsman et al. 2022, Model soups, arXiv 2203.05482")
def soup(stream: Stream) -> Iterator[Tensor]:
    """Σ θᵢ / k. An entry on which all models agree is kept exactly."""
    yield from linear(stream, weight=[1.0] * stream.count)
