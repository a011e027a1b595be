"""Barycentre of several models on a sphere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from symfuse.errors import IncompatibleError, OptionError
from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.parts.gram import PARALLEL, centred, combine, gram, norms
from symfuse.methods.parts.mean import normalized
from symfuse.methods.registry import method


@method(
    "multislerp",
    label="Multi-SLERP",
    paper="Goddard 2024, multislerp, goddard.blog/posts/multislerp-wow-what-a-cool-idea",
    base="optional",
)
def multislerp(
    stream: Stream, *, weight: PerModel, normalize_weights: bool = True, eps: float = 1e-8
) -> Iterator[Tensor]:
    """Direction: that of Σ wᵢ uᵢ, where uᵢ = vᵢ / (|vᵢ| + eps); length: Σ wᵢ |vᵢ|. The vᵢ are the tensors, or their
    deltas if there is a base, which is then added.

    The published method goes on: vectors from that mean to the uᵢ, in its tangent space, are added up with the weights
    and followed by the exponential map. That sum is zero at this mean, always (Σ wᵢ uᵢ has no part perpendicular to
    itself), so nothing is left to do. Where directions cancel (the sum is shorter than eps, or 1e-6 Σ |wᵢ|), or all
    vectors are zero: Σ wᵢ vᵢ. One model: itself. OptionError if weights that sum to zero are to be normalised.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise OptionError(f"eps is {eps}, expected a number of at least 0")
    if stream.count == 1:
        for block in stream:
            yield block.tensors[0]
        return
    vectors = centred(stream)
    shares = normalized(weight, "normalize_weights") if normalize_weights else list(weight)
    coefficients = barycentre(gram(stream, vectors), shares, eps)
    if coefficients.abs().max() > torch.finfo(stream.dtype).max:
        raise IncompatibleError(f"{stream.name}: the merge does not fit in {stream.dtype}; use smaller weights")
    yield from combine(stream, vectors, coefficients)


def barycentre(products: Tensor, weight: Sequence[float], eps: float) -> Tensor:
    """Coefficients (k,) from the Gram matrix (k, k)."""
    shares = torch.tensor(weight, dtype=torch.float64)
    lengths = norms(products)
    of_units = torch.where(lengths > 0, shares / (lengths + eps), 0)
    length = (of_units @ products @ of_units).clamp(min=0).sqrt()
    if length <= max(eps, PARALLEL**0.5 * float(shares.abs().sum())):
        return shares
    return of_units * (shares @ lengths) / length
