"""Task vectors made sparse, weighted, combined and added to a base: the common part of task arithmetic, TIES, DARE,
DELLA and breadcrumbs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.stream import Stream
from symfuse.methods.parts.mean import mean, steps
from symfuse.methods.parts.sparsify import Sparsifier, per_model, repeatable, where


def combined(
    stream: Stream,
    weight: Sequence[float],
    density: Sequence[float],
    sparsify: Callable[[Stream, list[float]], Sparsifier],
    *,
    vote: bool,
    normalize: bool,
    scale: float,
) -> Iterator[Tensor]:
    """Blocks of base + scale · Σ wᵢ sᵢ(δᵢ), where sᵢ makes a task vector sparse.

    sparsify: from the stream and the density of each model. vote: the majority sign of an entry is that of the sum of
    the weighted vectors (Yadav et al. 2023, arXiv 2306.01708, algorithm 1; zero counts as positive), and only values of
    that sign are added; zeros have no sign. normalize: divide by the sum of the weights (with vote, of the values that
    are added; a sum of zero divides by one). A model of weight 0 has no influence, one of density 0 adds nothing and
    has no vote, one of density 1 is not made sparse. If no used model is made sparse and shares sum to one, an entry on
    which they agree is kept exactly. OptionError before anything is read.
    """
    weights = per_model(stream, "weight", weight, -math.inf, math.inf)
    densities = per_model(stream, "density", density, 0.0, 1.0)
    sparsifier = sparsify(stream, densities)
    if not math.isfinite(scale):
        raise OptionError(f"{stream.name}: lambda is {scale}, expected a finite number")
    present = [i for i, weight in enumerate(weights) if weight]
    used = [i for i in present if densities[i] > 0]
    sparse = [i for i in used if densities[i] < 1 and stream.rows]
    total = math.fsum(weights)
    if not normalize or abs(total) <= 1e-12 * max(map(abs, weights), default=0.0):
        total = 1.0
    shares = scale if vote and normalize else math.fsum(weights) * scale / total
    exact = not sparse and used == present and abs(shares - 1) <= 1e-12 and (normalize or not vote)
    order = steps([weights[i] * scale / total for i in used]) if exact and not vote else []
    blocks = repeatable(stream)
    sparsifier.prepare(blocks, sparse)
    for block in blocks:
        if exact and not vote:  # the base cancels
            yield mean([block.tensors[i] for i in used], order)
            continue
        vectors = []
        for i in used:
            delta = block.tensors[i] - block.origin
            if i in sparse:
                delta = sparsifier(i, block, delta)
            vectors.append(delta if weights[i] == 1 else delta.mul_(weights[i]))
        if not vectors:
            yield block.origin
            continue
        if vote:
            mixed = agreed(vectors, [weights[i] for i in used], majority(vectors), normalize).mul_(scale)
        else:
            mixed = added(vectors).mul_(scale / total)
        out = mixed.add_(block.origin)
        yield where_equal([block.tensors[i] for i in used], out) if exact else out


def added(vectors: Sequence[Tensor]) -> Tensor:
    """The sum of the vectors, in place of the first."""
    out = vectors[0]
    for vector in vectors[1:]:
        out.add_(vector)
    return out


def majority(votes: Sequence[Tensor]) -> Tensor:
    """The sign of the sum of the votes, +1 or -1; +1 if that is zero."""
    return torch.copysign(torch.ones((), dtype=votes[0].dtype), added([votes[0].clone(), *votes[1:]]))


def agreed(vectors: Sequence[Tensor], weights: Sequence[float], sign: Tensor, normalize: bool) -> Tensor:
    """The sum of the entries with that sign, divided by the sum of their weights if `normalize` (by one if that is
    zero). Where none has it, NaN if a weight is too small for the dtype. vectors: already weighted; overwritten."""
    divisor = torch.zeros_like(sign) if normalize else None
    for vector, weight in zip(vectors, weights, strict=True):
        vector.mul_(sign).clamp_(min=0)
        if divisor is not None:
            divisor.add_(vector.sign(), alpha=weight)
    out = added(vectors).mul_(sign)
    if divisor is None:
        return out
    if min(weights) >= 0:  # where no entry has the sign, both sums are zero
        return out.div_(divisor.clamp_(min=min(filter(None, weights), default=1.0)))
    # Weights of both signs can cancel, up to rounding.
    zero = divisor.abs() <= len(weights) * torch.finfo(sign.dtype).eps * sum(map(abs, weights))
    return out.div_(divisor.mul_(~zero).add_(zero))


def where_equal(tensors: Sequence[Tensor], out: Tensor) -> Tensor:
    """`out`, with entries on which all tensors agree kept exactly, without the rounding of a weighted mean."""
    first, *others = tensors
    agree = torch.ones_like(first, dtype=torch.bool)
    for tensor in others:
        agree &= where(lambda a, b: a == b, tensor, first)
    return torch.where(agree, first, out)
