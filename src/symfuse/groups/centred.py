"""Rotations of centred features: what may act on a residual stream that LayerNorm reads, once its gains are folded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.groups.base import Element, PartMoments, total
from symfuse.groups.orthogonal import Orthogonal, Rotations, Similarity, polar, refuse_plain, signs_of, similar, turned

# Of |C|, below which an entry is rounding of features in float32.
ROUNDING = 1e-6


class Centred(Rotations):
    """Q with Qᵀ Q = 1 and Q 1 = ±1, reflections included: an O(n − 1) on the complement of the ones vector, and a sign.

    Such a Q commutes with centring up to its sign, so LayerNorm without gains commutes with it.

    best: in the basis of a Householder reflection H that maps the ones vector to a multiple of the first unit vector,
    Q = H diag(±1, Q') H. So ⟨Q, C⟩ is largest for the sign of C'₀₀ and the polar factor of the rest of C' = H C H
    (Schönemann 1966), C the sum of all cross-Grams. Of centred features C'₀₀ is nothing but rounding, which is left
    alone.
    """

    self_dual: ClassVar[bool] = True
    below: ClassVar[tuple[str, ...]] = ("permutation", "sign")

    label = "rotation that keeps the mean"

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Similarity:
        sign = torch.randint(0, 2, batch, generator=rng, dtype=torch.float64) * 2 - 1
        return _joined(sign, Orthogonal().random(n - 1, batch, rng).matrix)

    def tangent(self, n: int) -> dict[str, tuple[int, ...]]:
        return {"turn": (n, n)}

    def near(self, at: Mapping[str, Tensor]) -> Similarity:
        """The Cayley map of the skew part of `turn`, less its means over rows and columns: so it keeps the ones."""
        m = at["turn"] - at["turn"].mean(-1, keepdim=True)
        return Similarity(turned(m - m.mean(-2, keepdim=True)))

    def contains(self, g: Element, atol: float) -> bool:
        """Whether Q is orthogonal and maps the unit vector along the ones to plus or minus itself, to within atol."""
        q = similar(g)
        if q is None or not Orthogonal().contains(q, atol):
            return False
        image = q.matrix.sum(-1) / math.sqrt(q.size)
        sign = torch.where(image.sum(-1, keepdim=True) < 0, -1.0, 1.0).to(image.dtype)
        return bool(((image - sign / math.sqrt(q.size)).abs() <= atol).all())

    def best(self, moments: PartMoments) -> Similarity:
        refuse_plain(moments)
        c = _reflected(total(moments).xy)
        along = c[..., 0, 0]
        felt = along < -ROUNDING * torch.linalg.matrix_norm(c)
        return _joined(torch.where(felt, -1.0, 1.0).to(c.dtype), polar(c[..., 1:, 1:]))

    def principal(
        self, y: Float[Tensor, "*b n k"], vectors: Float[Tensor, "*b n j"]
    ) -> tuple[Similarity, Float[Tensor, "*b"]]:
        """As of Orthogonal, of the part of features that is orthogonal to the ones vector; and that of the vectors with
        the largest mean gets a positive one, unless all means are rounding."""
        v, share = _householder(y.shape[-2], y)
        rest, sure = Orthogonal().principal((y - share * v[:, None] * (v @ y)[..., None, :])[..., 1:, :])
        means = vectors.mean(-2)
        felt = means.abs().sum(-1) > ROUNDING * vectors.abs().mean(-2).sum(-1)
        sign, along = signs_of(means)
        sign, along = torch.where(felt, sign, 1.0), torch.where(felt, along, 1.0)
        return _joined(sign, rest.matrix), torch.minimum(along, sure)


def _joined(sign: Float[Tensor, "*b"], rest: Float[Tensor, "*b m m"]) -> Similarity:
    """H diag(sign, rest) H."""
    n = rest.shape[-1] + 1
    q = rest.new_zeros(*rest.shape[:-2], n, n)
    q[..., 0, 0], q[..., 1:, 1:] = sign, rest
    return Similarity(_reflected(q))


def _reflected(c: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """H C H, as two changes of rank one."""
    v, share = _householder(c.shape[-1], c)
    c = c - share * v[:, None] * (v @ c)[..., None, :]
    return c - share * (c @ v)[..., :, None] * v


def _householder(n: int, like: Tensor) -> tuple[Float[Tensor, {n}], Tensor]:
    """v and 2/|v|², of which H = 1 − 2vvᵀ/|v|² maps u = 1/√n to −e₁: v = u + e₁."""
    v = like.new_full((n,), 1 / math.sqrt(n))
    v[0] += 1
    return v, 2 / (v @ v)
