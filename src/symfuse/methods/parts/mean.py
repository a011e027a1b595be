"""The mean of tensors by weights that sum to one, and these weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from symfuse.errors import OptionError


def normalized(weights: Sequence[float], key: str = "normalize") -> list[float]:
    """Weights divided by their sum; OptionError unless that is above zero. key: the parameter that turns this off, if
    there is one."""
    off = f"do not normalise them (`{key}: false` under `parameters` of a recipe, --set {key}=false"
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
    """Whether shares sum to one, up to rounding of float64."""
    return abs(sum(shares) - 1) <= 1e-12


def steps(shares: Sequence[float]) -> list[tuple[int, float]]:
    """The order in which tensors are added to a mean, and the step of the mean towards each.

    The largest share comes first, so that partial sums are never zero, whatever the signs: they rise to one or above,
    and then fall to one. A share of zero is skipped.
    """
    out, total = [], 0.0
    for number in sorted(range(len(shares)), key=lambda i: -shares[i]):
        if shares[number]:
            total += shares[number]
            out.append((number, shares[number] / total))
    return out


def mean(tensors: Sequence[Tensor], order: Sequence[tuple[int, float]]) -> Tensor:
    """Σ wᵢ θᵢ in place of one of the tensors; all are overwritten. order: of `steps`.

    A step from a to b is a - w (a - b), which is exactly a where both are equal, without a comparison, which would take
    three times as long as the sum. The sign of a zero is kept too, as long as the factor of the difference is negative:
    hence a + w (b - a) if w is. The error is that of differences, which are small between fine-tunes: in float32 half
    of that of a sum of products. Entries near the largest float may overflow.
    """
    (first, _), *others = order
    out = tensors[first]
    for number, share in others:
        step = tensors[number]
        torch.sub(*((out, step) if share > 0 else (step, out)), out=step)
        out.add_(step, alpha=-abs(share))
    return out
