"""Permutations while they are learned: no elements of a group, but what acts in their place, with gradients.

The gradient of a permutation by its scores does not exist. Straight through (Bengio et al. 2013; Ainsworth et al. 2023,
Section 3.3) the tensor is reordered by the permutation, and the scores get the gradient that the matrix of it would
have. Softly (Mena et al. 2018) the matrix is doubly stochastic, and becomes a permutation as its temperature falls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symfuse.groups.assignment import assign_batch
from symfuse.groups.base import Action, multiply
from symfuse.groups.coupling import doubly_stochastic


@dataclass(frozen=True, eq=False)
class Relaxed(Action):
    """Reorders by `index`, with the gradient of the matrix `scores`; without an index it multiplies by that matrix.
    Then each row is multiplied by its scale, if there are any."""

    scores: Float[Tensor, "*b n n"]
    index: Int[Tensor, "*b n"] | None = None
    scale: Float[Tensor, "*b n"] | None = None

    def act(self, w: Tensor, dim: int) -> Tensor:
        out = multiply(self.scores, w, dim) if self.index is None else reorder(w, self.scores, self.index, dim)
        if self.scale is None:
            return out
        shape = [*self.scale.shape[:-1], *[1] * (w.ndim - self.scale.ndim + 1)]
        shape[dim] = self.scale.shape[-1]
        return out * self.scale.reshape(shape).to(out.dtype)

    def dual(self) -> Relaxed:
        return Relaxed(self.scores, self.index, None if self.scale is None else 1 / self.scale)

    def forget(self) -> Relaxed:
        return Relaxed(self.scores, self.index)

    @property
    def reorders_only(self) -> bool:
        return False


class _Reorder(torch.autograd.Function):
    """w[index] along a dimension; backwards as the product with the matrix that the scores stand for."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, scores: Tensor, index: Tensor, dim: int) -> Tensor:
        shape = [*index.shape[:-1], *[1] * (w.ndim - index.ndim + 1)]
        shape[dim] = index.shape[-1]
        where = index.reshape(shape)
        ctx.save_for_backward(w, index, where)
        ctx.dim, ctx.dtype = dim, scores.dtype
        return torch.take_along_dim(w, where, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,) = gradients
        w, index, where = ctx.saved_tensors
        back = torch.take_along_dim(gradient, where.argsort(ctx.dim), ctx.dim) if ctx.needs_input_grad[0] else None
        rows, k = None, index.ndim - 1
        if ctx.needs_input_grad[1]:
            d, x = (t.movedim(ctx.dim, k).reshape(*index.shape, -1) for t in (gradient, w))
            rows = (d @ x.mT).to(ctx.dtype)
        return back, rows, None, None


def reorder(w: Tensor, scores: Tensor, index: Tensor, dim: int) -> Tensor:
    """w[index] along a dimension, with the gradient of a product with the scores."""
    out: Tensor = _Reorder.apply(w, scores, index, dim)  # type: ignore[no-untyped-call]
    return out


def straight_through(scores: Float[Tensor, "*b n n"], scale: Tensor | None = None) -> Relaxed:
    """The permutation of the largest sum of scores, whose gradient they get."""
    return Relaxed(scores, assign_batch(scores.detach()), scale)


def soft(scores: Float[Tensor, "*b n n"], temperature: float, scale: Tensor | None = None) -> Relaxed:
    """The doubly stochastic matrix of the scores, with their gradient."""
    return Relaxed(doubly_stochastic(scores, temperature), None, scale)
