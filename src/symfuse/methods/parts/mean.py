"""The mean of tensors by weights that sum to one, and these weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from symfuse.errors import OptionError


def normalized(weights: Sequence[float], key: str = "normalize") -> list[float]:
    """Weights divided by their sum; OptionError if that is not above zero, where dividing would make no sense.
    key: the parameter that turns this off, if there is one."""
    off = f"take them as they are (`{key}: false` under `parameters` of a recipe, --set {key}=false"
    off += ", --no-normalize)" if key == "normalize" else ")"
    off = off if key else "give weights whose sum is above zero"
    if not all(math.isfinite(w) for w in weights):
        raise OptionError(f"weights {list(weights)}: each must be a finite number")
    total = math.fsum(weights)
    if abs(total) <= 1e-12 * max(map(abs, weights), default=0.0):
        raise OptionError(f"weights {list(weights)} sum to zero and cannot be normalised; {off}")
    if total < 0:
        raise OptionError(
            f"weights {list(weights)} sum to less than zero, so normalising would turn their signs; {off}"
        )
    return [w / total for w in weights]


def sum_to_one(shares: Sequence[float]) -> bool:
    """As nearly as float64 can tell."""
    return abs(sum(shares) - 1) <= 1e-12


def steps(shares: Sequence[float]) -> list[tuple[int, float]]:
    """The order in which tensors are taken into a mean, and how far it then moves towards each.

    The largest share comes first, so that what was taken so far never sums to zero, whatever signs there are: it rises
    to one or above, and from there falls to one. A share of zero moves nothing.
    """
    out, total = [], 0.0
    for number in sorted(range(len(shares)), key=lambda i: -shares[i]):
        if shares[number]:
            total += shares[number]
            out.append((number, shares[number] / total))
    return out


def mean(tensors: Sequence[Tensor], order: Sequence[tuple[int, float]]) -> Tensor:
    """Σ wᵢ θᵢ, in the place of one of the tensors; all are overwritten. order: of `steps`.

    A step from a to b is a - w (a - b). Where both are equal that is a, to the bit, without looking for such places:
    comparing takes three times as long as the sum. The sign of a zero is kept too, as long as what multiplies the
    difference is below zero: hence a + w (b - a) if w is. The error is that of differences, which between fine-tunes
    are small: in float32 it is half of that of a sum of products. Of entries near the largest it may overflow.
    """
    (first, _), *others = order
    out = tensors[first]
    for number, share in others:
        there = tensors[number]
        torch.sub(*((out, there) if share > 0 else (there, out)), out=there)
        out.add_(there, alpha=-abs(share))
    return out
