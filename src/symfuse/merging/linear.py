"""The weighted sum of models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from symfuse.merging.base import method


@method("linear", label="Linear", paper="Wortsman et al. 2022, Model soups, arXiv 2203.05482")
def linear(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ wᵢ θᵢ. Where all models agree and the weights sum to one: the entry itself, without the sum's rounding."""
    out = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        out.add_(tensor, alpha=weight)
    if abs(sum(weights) - 1) > 1e-12:
        return out
    agree = torch.ones_like(out, dtype=torch.bool)
    for tensor in tensors[1:]:
        agree &= tensor == tensors[0]
    return torch.where(agree, tensors[0], out)
