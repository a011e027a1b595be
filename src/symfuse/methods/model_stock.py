"""The average of few fine-tuned models, drawn towards the base by the angle between them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from symfuse.merging.stream import Stream
from symfuse.methods.parts.gram import combine, cosines, deltas, gram
from symfuse.methods.registry import method


@method(
    "model_stock",
    label="Model Stock",
    paper="Jang et al. 2024, Model Stock, arXiv 2403.19522",
    base="required",
    models=(2, None),
)
def model_stock(stream: Stream, *, filter_wise: bool = False) -> Iterator[Tensor]:
    """base + t · mean of the k deltas, with t = k cos θ / (1 + (k-1) cos θ) and cos θ the mean over pairs of deltas.

    filter_wise: each row has its own t. Equal models give t = 1; perpendicular deltas, or zero ones (whose cosine
    counts as 0), t = 0, the base; opposite ones, whose denominator is below 1e-6, the base too.
    """
    products = gram(stream, deltas, rows=filter_wise)
    yield from combine(stream, deltas, stock(products))


def stock(products: Tensor) -> Tensor:
    """Coefficients (k, …) of the deltas, from their Gram matrix (k, k, …)."""
    count = len(products)
    first, second = torch.triu_indices(count, count, 1)
    cosine = cosines(products)[first, second].mean(0)
    denominator = 1 + (count - 1) * cosine
    ratio = torch.where(denominator.abs() < 1e-6, 0, cosine / denominator)
    return ratio.expand(count, *ratio.shape)
