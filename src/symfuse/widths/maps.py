"""How an axis of n units becomes one of m ≥ n, and back: a primal and a dual map, [m, n], with dualᵀ primal = 1.

Weights that write the axis go through the primal map, those that read it through the dual one, so that the values that
are read do not change.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.groups import Part

# Rounding: for a sum of shares that should be one, and for an inner product that should be zero.
ROUNDING = 1e-9


class Widening(ABC):
    """A map from n units to m: `act` widens a tensor, and `back` is its left inverse. Tensors are [*b, n, …], where *b
    are the first k dimensions; a map with a batch of its own has that *b."""

    @abstractmethod
    def act(self, w: Tensor, k: int, part: Part) -> Tensor:
        """[*b, n, …] → [*b, m, …], as a dimension of that variance is widened."""

    @abstractmethod
    def back(self, w: Tensor, k: int, part: Part) -> Tensor:
        """[*b, m, …] → [*b, n, …], with back(act(w)) = w."""


@dataclass(frozen=True)
class Duplication(Widening):
    """Unit i of m is a copy of unit index[i] of n: its incoming weights are copied, and its outgoing ones are
    multiplied by share[i]. Gains and gates are copied. The shares of all copies of a unit sum to one; SymmetryError
    otherwise. (A semi-permutation: Theus et al. 2025, Section 3.)"""

    size: int
    index: Int[Tensor, "*b m"]
    share: Float[Tensor, "*b m"]

    def __post_init__(self) -> None:
        if not bool(((self.index >= 0) & (self.index < self.size)).all()):
            raise SymmetryError(f"there are units 0 to {self.size - 1}, and a copy is of unit {int(self.index.max())}")
        sums = _sums(self.share, self.index, self.size)
        if not bool(((sums - 1).abs() <= ROUNDING).all()):  # NaN compares false
            worst = sums.reshape(-1)[(sums - 1).abs().argmax()]
            raise SymmetryError(
                f"the shares of the copies of a unit sum to {float(worst):.6g}, not to one: what reads them would read "
                "something else; each unit needs a copy, and `Duplication.of` makes the shares of all copies equal"
            )

    @classmethod
    def even(cls, n: int, m: int) -> Duplication:
        """Unit i is a copy of unit i mod n, with equal shares."""
        return cls.of(torch.arange(m) % n, n)

    @classmethod
    def of(cls, index: Int[Tensor, "*b m"], size: int) -> Duplication:
        """The same copies with equal shares for all copies of a unit."""
        counts = _sums(torch.ones(index.shape, dtype=torch.float64), index, size)
        return cls(size, index, 1 / counts.gather(-1, index))

    @property
    def balanced(self) -> bool:
        """Whether all units have equal numbers of copies, with equal shares: then mean and variance over the units do
        not change."""
        return bool(((self.share - self.size / self.index.shape[-1]).abs() <= ROUNDING).all())

    def act(self, w: Tensor, k: int, part: Part) -> Tensor:
        index, share = self._beside(w, k)
        out = torch.take_along_dim(w, index.expand(*w.shape[:k], -1, *w.shape[k + 1 :]), k)
        return out * share.to(w.dtype) if part == "dual" else out

    def back(self, w: Tensor, k: int, part: Part) -> Tensor:
        """Of weights that write, the mean over copies, weighted by shares; of weights that read, the sum."""
        index, share = self._beside(w, k)
        w = w if part == "dual" else w * share.to(w.dtype)
        out = w.new_zeros(*w.shape[:k], self.size, *w.shape[k + 1 :])
        return out.scatter_add_(k, index.expand(w.shape), w)

    def _beside(self, w: Tensor, k: int) -> tuple[Tensor, Tensor]:
        own = self.index.shape
        shape = (*[1] * (k + 1 - len(own)), *own, *[1] * (w.ndim - k - 1))
        return self.index.reshape(shape), self.share.reshape(shape)


@dataclass(frozen=True)
class Isometry(Widening):
    """w → primal · E w for weights that write, dual · E w for weights that read, with Eᵀ E = 1; SymmetryError
    otherwise. Values that are read are multiplied by primal · dual, which is one except inside of heads, where it
    corrects the scale of the softmax."""

    matrix: Float[Tensor, "m n"]
    primal: float = 1.0
    dual: float = 1.0

    def __post_init__(self) -> None:
        gram = self.matrix.mT @ self.matrix
        if bool(((gram - torch.eye(len(gram), dtype=gram.dtype)).abs() > ROUNDING).any()):
            raise SymmetryError("the matrix that widens an axis is not an isometry: its columns are not orthonormal")

    @classmethod
    def padding(cls, n: int, m: int, primal: float = 1.0) -> Isometry:
        """Append m − n zeros."""
        return cls(torch.eye(m, n, dtype=torch.float64), primal)

    @classmethod
    def stream(cls, matrix: Float[Tensor, "m n"]) -> Isometry:
        """For a stream that norms read: keeps the mean of squares, over m units instead of n."""
        m, n = matrix.shape
        return cls(matrix, math.sqrt(m / n), math.sqrt(n / m))

    def act(self, w: Tensor, k: int, part: Part) -> Tensor:
        return self._times(self.matrix * self._factor(part), w, k)

    def back(self, w: Tensor, k: int, part: Part) -> Tensor:
        return self._times(self.matrix.mT / self._factor(part), w, k)

    def _factor(self, part: Part) -> float:
        if part == "plain":
            raise SymmetryError(
                "a gain of a norm, or a gate, stands on this axis: its units can be copied, not rotated"
            )
        return self.primal if part == "primal" else self.dual

    @staticmethod
    def _times(matrix: Tensor, w: Tensor, k: int) -> Tensor:
        out: Tensor = torch.tensordot(w.movedim(k, -1), matrix.mT.to(w.dtype), 1)
        return out.movedim(-1, k)


def keeping_mean(columns: Float[Tensor, "m k"]) -> Float[Tensor, "m n"]:
    """n = k + 1. The isometry that maps the unit vector along the ones to that in m dimensions, and its orthogonal
    complement, in the basis of a Householder reflection, to these orthonormal columns. The columns must be orthogonal
    to the ones: then means are preserved, and centred vectors stay centred."""
    m, n = len(columns), columns.shape[1] + 1
    ones = torch.full((m, 1), 1 / math.sqrt(m), dtype=columns.dtype)
    return torch.cat([ones, columns], -1) @ _householder(n).mT


def centred_basis(m: int) -> Float[Tensor, "m k"]:
    """k = m − 1: an orthonormal basis of the vectors without a mean."""
    return _householder(m)[:, 1:]


def _householder(n: int) -> Float[Tensor, "n n"]:
    """An orthogonal matrix whose first column is the unit vector along the ones."""
    v = torch.full((n,), -1 / math.sqrt(n), dtype=torch.float64)
    v[0] += 1
    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    return torch.eye(n, dtype=torch.float64) - torch.outer(v, v) * (2 / (v @ v))


def _sums(values: Tensor, index: Tensor, size: int) -> Tensor:
    """The sum of the values of all copies of each unit."""
    return values.new_zeros(*values.shape[:-1], size).scatter_add_(-1, index, values)
