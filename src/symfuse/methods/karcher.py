"""Riemannian mean of several models on a sphere."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.stream import Stream
from symfuse.methods.parts.gram import PARALLEL, combine, cosines, gram, inverse, models, norms
from symfuse.methods.registry import method


@method("karcher", label="Karcher mean", paper="arXiv 2603.04972; Karcher 1977, Riemannian center of mass")
def karcher(stream: Stream, *, max_iter: int = 10, tol: float = 1e-5) -> Iterator[Tensor]:
    """The point of the unit sphere with the least sum of squared angles to the tensors' directions, times their mean
    length; each tensor as one long vector.

    Computed by at most `max_iter` gradient steps, each along the mean of the vectors that lead to the directions, until
    that is shorter than `tol`. All this happens in coefficients, of which there is one per model. Zero tensors have no
    direction and count in the mean length only. If the directions cancel (their mean is shorter than tol), the search
    starts from the first one: opposite tensors have no unique mean, and the result depends on their order.
    """
    if max_iter < 0:
        raise OptionError(f"max_iter is {max_iter}, expected at least 0")
    if tol < 0:
        raise OptionError(f"tol is {tol}, expected at least 0")
    yield from combine(stream, models, mean_direction(gram(stream, models), max_iter, tol))


def mean_direction(products: Tensor, max_iter: int, tol: float) -> Tensor:
    """Coefficients (k,) from the Gram matrix (k, k)."""
    lengths = norms(products)
    units = cosines(products)
    share = (lengths > 0).double()
    share /= share.sum().clamp(min=1)
    length = _length(units, share)
    if length > max(tol, PARALLEL**0.5):
        point = share / length
    else:  # the first that has a direction, if any
        point = torch.zeros_like(share)
        point[int((lengths > 0).double().argmax())] = 1
    for _ in range(max_iter):
        cosine = (units @ point).clamp(-1, 1)
        sine = (1 - cosine.square()).sqrt()
        # θ / sin θ; at the point itself its limit, at the antipode no way is shorter than another
        stretch = torch.where(sine.square() > PARALLEL, torch.acos(cosine) / sine, (cosine > 0).double())
        tangent = share * stretch - (share * stretch * cosine).sum() * point
        step = _length(units, tangent)
        if step <= tol:
            break
        point = torch.cos(step) * point + torch.sin(step) / step * tangent
        point /= _length(units, point)
    return lengths.mean() * point * inverse(lengths)


def _length(units: Tensor, coefficients: Tensor) -> Tensor:
    """The length of the vector with these coefficients of the unit vectors."""
    return (coefficients @ units @ coefficients).clamp(min=0).sqrt()
