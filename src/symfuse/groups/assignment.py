"""The permutation that maximises a sum of scores, exactly: the closed form of every permutation symmetry.

Some optima can be read off: no permutation scores more than the sum of the row maxima (or of the column
maxima), so where those lie at distinct places, they are the optimum. That is the common case for fine-tunes
of one model. From LARGE units on, an auction that numba compiles finds the rest (`auction`), where numba is installed.

Everything else goes to scipy's shortest augmenting paths (Crouse 2016), started warm: a constant taken from a column
changes the sum of every permutation alike, hence not which is best, and prices near the dual optimum leave the solver
little to search. Wrong prices would cost time and nothing else.
Measurements, and the solvers not taken: docs/decisions/assignment.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from symfuse.errors import SymmetryError

Solver = Callable[[Any], Any]  # from a matrix to indices, of numpy, or None

LARGE = 2048  # units from which on it pays to load, and once to compile, the auction
MAX_SIZE = 46340  # of scipy: above it, the matrix has more than 2^31 entries
_FLOAT64 = 9  # bytes for each score that scipy takes, most of them a copy in float64
_WARM_SIZE = 256  # below it, scipy alone is as fast
_STAGES, _SWEEPS, _TEMPERATURE = 3, 10, 0.2  # the temperature in standard deviations of the scores


def assign(scores: Real[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """argmax over permutations p of Σᵢ scores[i, p[i]], exact in float64; on the device of the scores.

    Where several permutations are optimal it returns one of them, the same each time for the same scores and
    software: from each row its first maximum if these are distinct, else the solver's choice.

    Raises SymmetryError if a score is not finite (it says how many are not) or, where scipy must do it, if
    n > MAX_SIZE.

    >>> assign(torch.tensor([[1.0, 5.0], [0.0, 4.5]]))
    tensor([0, 1])
    """
    return assign_batch(scores[None])[0]


def assign_batch(scores: Real[Tensor, "*b n n"]) -> Int[Tensor, "*b n"]:
    """`assign` for every matrix of a batch, such as the heads of all layers. Raises as `assign` does."""
    n = scores.shape[-1]
    if not _by_auction(n):
        _require_size(n)
    if scores.numel() == 0:
        return torch.zeros(scores.shape[:-1], dtype=torch.long, device=scores.device)
    matrices = scores.detach().reshape(-1, n, n)
    if not torch.stack(matrices.aminmax()).isfinite().all():
        raise SymmetryError(
            f"{int((~matrices.isfinite()).sum())} of {matrices.numel()} matching scores are not finite, so "
            f"no permutation is best. Look for NaN or infinity in the weights or statistics they come from."
        )
    indices = matrices.argmax(-1)
    for k in (~_distinct(indices)).nonzero().flatten().tolist():
        indices[k] = _solve(matrices[k])
    return indices.reshape(scores.shape[:-1])


def workspace(n: int) -> int:
    """About how many bytes assigning n units takes beside their scores."""
    return 700 * n if _by_auction(n) else _FLOAT64 * n * n


def _by_auction(n: int) -> bool:
    return n >= LARGE and _solver() is not None


@cache
def _solver() -> Solver | None:
    """The compiled auction, which is imported; None where numba is missing, or not for this version of Python or
    numpy."""
    try:
        from symfuse.groups.auction import solve
    except (ImportError, OSError):
        return None
    return solve


def _require_size(n: int) -> None:
    if n > MAX_SIZE:
        raise SymmetryError(
            f"an assignment of {n} units by scipy needs about {_FLOAT64 * n * n / 2**30:.0f} GiB beside its scores; "
            f"the most supported is {MAX_SIZE} units. Leave this axis out, split it into groups, or install numba "
            f"(pip install 'symfuse[fast]'): what it compiles has no such limit."
        )


def _distinct(places: Int[Tensor, "*b n"]) -> Bool[Tensor, "*b"]:
    """Whether the places are a permutation of 0 … n − 1."""
    everywhere = torch.arange(places.shape[-1], device=places.device)
    return (places.sort(-1).values == everywhere).all(-1)


def _solve(scores: Real[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """The assignment where the row maxima are not it."""
    if _by_auction(len(scores)):
        index = _auction(scores)
        if index is not None:
            return index
    # A row without a column gets column 0, as does the row that has column 0: they are not distinct.
    columns = (scores == scores.amax(0)).byte().argmax(-1)
    return columns if _distinct(columns) else _paths(scores)


def _auction(scores: Real[Tensor, "n n"]) -> Int[Tensor, " n"] | None:
    """By the compiled auction; None where it did not prove its result, or where numba finds no space to keep in a
    folder what it has compiled."""
    wide = scores.float() if scores.dtype.is_floating_point and scores.dtype.itemsize <= 4 else scores.double()
    solve = _solver()
    assert solve is not None
    try:
        index = solve(wide.cpu().contiguous().numpy())
    except OSError:
        return None
    return None if index is None else torch.as_tensor(index, device=scores.device)


def _paths(scores: Real[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """The assignment of least cost by scipy, the costs being column prices minus scores, in float64."""
    from scipy.optimize import linear_sum_assignment

    _require_size(len(scores))
    prices = _prices(scores) if len(scores) >= _WARM_SIZE else torch.zeros_like(scores[0])
    costs = torch.empty(scores.shape, dtype=torch.float64).copy_(scores)  # in place: a difference would widen it twice
    costs.neg_().add_(prices.cpu().double())
    return torch.as_tensor(linear_sum_assignment(costs.numpy())[1], device=scores.device)


def _prices(scores: Real[Tensor, "n n"]) -> Float[Tensor, " n"]:
    """Nearly optimal dual prices of the columns, by a few Sinkhorn sweeps at each of falling temperatures.

    The plan exp((scores − u − v)/T) is scaled to unit row and column sums (Cuturi 2013); then v is optimal at
    the temperature T. The fourth power of the scaled plan is the plan to start with at the temperature T/4.
    """
    surplus = scores.float() - scores.float().amax(1, keepdim=True)
    prices = surplus.amax(0)
    temperature = _TEMPERATURE * float(scores.float().std())
    plan = surplus.sub_(prices).div_(temperature).exp_()
    row_scale = column_scale = torch.ones_like(prices)
    for stage in range(_STAGES):
        if stage > 0:
            plan.mul_(row_scale[:, None]).mul_(column_scale).square_().square_()
            temperature /= 4
            column_scale = torch.ones_like(prices)
        for _ in range(_SWEEPS):
            row_scale = 1 / (plan @ column_scale)
            column_scale = 1 / (row_scale @ plan)
        prices = prices - temperature * column_scale.log()
    if not prices.isfinite().all():  # the plan has underflowed, or the scores are constant: start cold
        return torch.zeros_like(prices)
    # On a coarse grid of binary fractions, tied scores stay tied and prices − scores is hardly rounded.
    grid = 2.0 ** math.floor(math.log2(temperature / 4))
    return (prices / grid).round() * grid
