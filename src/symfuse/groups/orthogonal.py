"""Rotations (reflections included) and rotations with one positive scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.groups.base import Dense, Element, Group, Moments, PartMoments, multiply, row_norms, total
from symfuse.groups.monomial import Monomial, positive, random_scales
from symfuse.groups.scale import best_scale

NO_PERMUTATION_PART = (
    "a rotation has no permutation part: an axis that some tensor has as |axis| (a norm gain, a gate) cannot "
    "be rotated; fold the gain first, or choose a permutation for this axis"
)


def refuse_plain(moments: PartMoments) -> None:
    """SymmetryError if there are moments of |g|."""
    if "plain" in moments:
        raise SymmetryError(NO_PERMUTATION_PART)


@dataclass(frozen=True, eq=False)
class Similarity(Dense):
    """w → scale · Q w with Q orthogonal; its dual is w → Q w / scale."""

    matrix: Float[Tensor, "*b n n"]
    scale: Float[Tensor, "*b"] | None = None

    def act(self, w: Tensor, dim: int) -> Tensor:
        return multiply(self.matrix if self.scale is None else self.matrix * self.scale[..., None, None], w, dim)

    def dual(self) -> Similarity:
        return Similarity(self.matrix, None if self.scale is None else 1 / self.scale)

    def forget(self) -> Similarity:
        raise SymmetryError(NO_PERMUTATION_PART)

    def inverse(self) -> Similarity:
        return Similarity(self.matrix.transpose(-1, -2), None if self.scale is None else 1 / self.scale)

    def __matmul__(self, other: Similarity) -> Similarity:
        scales = [g.scale for g in (self, other) if g.scale is not None]
        scale = scales[0] * scales[1] if len(scales) == 2 else (scales[0] if scales else None)
        return Similarity(self.matrix @ other.matrix, scale)

    def inner(self, c: Tensor) -> Tensor:
        value = super().inner(c)
        return value if self.scale is None else value * self.scale.double()

    def gain(self, yy: Tensor) -> Tensor:
        norm = row_norms(yy, self.batch).sum(-1)
        return norm if self.scale is None else norm * self.scale.to(yy.dtype) ** 2

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix} | ({} if self.scale is None else {"scale": self.scale})

    def rebuild(self, tensors: Mapping[str, Tensor]) -> Similarity:
        return Similarity(tensors["matrix"], tensors.get("scale"))

    def is_identity(self) -> bool:
        return super().is_identity() and (self.scale is None or bool((self.scale == 1).all()))


def similar(g: Element) -> Similarity | None:
    """A signed permutation, with one scale for all units or none, as a similarity; None for what is no similarity."""
    if isinstance(g, Similarity):
        return g
    if not isinstance(g, Monomial):
        return None
    sizes = torch.ones_like(g.index, dtype=torch.float64) if g.scale is None else g.scale.abs()
    if not bool((sizes == sizes[..., :1]).all()):
        return None
    scale = sizes[..., 0]
    matrix = g.to_dense() / torch.where(scale > 0, scale, 1.0)[..., None, None]
    return Similarity(matrix, None if bool((scale == 1).all()) else scale)


def polar(c: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """argmax over Q in O(n) of ⟨Q, C⟩ = U Vᵀ, where C = U Σ Vᵀ (Schönemann 1966)."""
    u, _, vt = bases(c)
    q: Tensor = u @ vt
    return q


def bases(c: Float[Tensor, "*b n n"]) -> tuple[Tensor, Tensor, Tensor]:
    """Orthogonal U and V, as U, s and Vᵀ, of which U Vᵀ is the polar factor of C, and Uᵀ C V the diagonal of s but for
    what is symmetric and of the size of rounding.

    V are eigenvectors of CᵀC. So the columns of C V are orthogonal but for rounding; with the roots s of the
    eigenvalues, U = C V / s and E = UᵀU − 1, the polar factor is U (1 − M) Vᵀ for M_ij = E_ij s_i / (s_i + s_j), to
    first order in E. The second is rounding where singular values differ by less than some 10⁴; elsewhere it is the
    SVD. Of 64 rows this takes a fifth less time than SVDs, and C is no further from a matrix of which the polar factor
    is exact.
    """
    if not c.numel():
        return _svd(c)
    flat = c.reshape(-1, *c.shape[-2:])
    gram = flat.mT @ flat
    if not bool(gram.sum().isfinite()):  # squares that are too large for the dtype
        return _svd(c)
    values, v = torch.linalg.eigh(gram)
    s = values.sqrt_()  # NaN of those that rounding has made negative
    u = flat @ v
    u /= s[:, None]
    e = u.mT @ u
    e.diagonal(dim1=-2, dim2=-1).sub_(1)
    far = ~(torch.linalg.vector_norm(e, dim=(-2, -1)) <= torch.finfo(c.dtype).eps ** 0.5)
    m = s[:, None] + s[:, :, None]
    torch.div(s[:, :, None], m, out=m).mul_(e)
    s = s * (1 + e.diagonal(dim1=-2, dim2=-1)).sqrt()
    u, vt = torch.baddbmm(u, u, m, alpha=-1), v.mT
    if bool(far.any()):
        vt = vt.clone()
        u[far], s[far], vt[far] = _svd(flat[far])
    return u.reshape(c.shape), s.reshape(c.shape[:-1]), vt.reshape(c.shape)


def _svd(c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vt = torch.linalg.svd(c)
    return u, s, vt


def nuclear_norms(c: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b"]:
    """max over Q in O(n) of ⟨Q, C⟩ = |C|_*, the sum of the singular values, float64: what a rotation is worth.

    A third of the time of `polar`; the square roots of the eigenvalues of CᵀC take as long, and are less exact.
    """
    norms: Tensor = torch.linalg.svdvals(c.double()).sum(-1)
    return norms


class Rotations(Group):
    """A group of similarities."""

    def identity(self, n: int, batch: tuple[int, ...]) -> Similarity:
        return Similarity(torch.eye(n, dtype=torch.float64).expand(*batch, n, n))


class Orthogonal(Rotations):
    """Q with Qᵀ Q = 1, reflections included.

    best: the polar factor of C, the sum of all cross-Grams (Zhang et al. 2025, Theorem 4.1).
    """

    self_dual: ClassVar[bool] = True
    below: ClassVar[tuple[str, ...]] = ("centred", "signed", "phase")

    label = "rotation"

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Similarity:
        q, r = torch.linalg.qr(torch.randn(*batch, n, n, generator=rng, dtype=torch.float64))
        return Similarity(q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1))[..., None, :])  # Haar measure

    def tangent(self, n: int) -> dict[str, tuple[int, ...]]:
        return {"turn": (n, n)}

    def near(self, at: Mapping[str, Tensor]) -> Similarity:
        """The Cayley map of the skew part of `turn`."""
        return Similarity(turned(at["turn"]))

    def contains(self, g: Element, atol: float) -> bool:
        q = similar(g)
        if q is None or (q.scale is not None and not bool(((q.scale - 1).abs() <= atol).all())):
            return False
        gram = q.matrix.transpose(-1, -2) @ q.matrix
        return bool(((gram - torch.eye(q.size, dtype=gram.dtype, device=gram.device)).abs() <= atol).all())

    def best(self, moments: PartMoments) -> Similarity:
        refuse_plain(moments)
        return Similarity(polar(total(moments).xy))

    def reach(self, c: Float[Tensor, "*b n n"], plain: Float[Tensor, "*b n n"] | None = None) -> Float[Tensor, "*b"]:
        assert plain is None  # it has no permutation part
        return nuclear_norms(c)

    def principal(self, y: Float[Tensor, "*b n k"]) -> tuple[Similarity, Float[Tensor, "*b"]]:
        """Q with Q Y Yᵀ Qᵀ diagonal, the largest first, and the largest entry of each row of Q Y positive: the same
        features for all Y that differ by a rotation. And how far Q is determined: the smallest gap between two
        eigenvalues, relative to the largest, or between a row's largest entries of both signs if that is smaller."""
        values, vectors = torch.linalg.eigh(y @ y.mT)
        gaps = values.diff(dim=-1).amin(-1) / values[..., -1] if y.shape[-2] > 1 else torch.ones_like(values[..., 0])
        q = vectors.flip(-1).mT
        sign, sure = signs_of(q @ y)
        return Similarity(sign[..., None] * q), torch.minimum(gaps, sure.amin(-1))


def signs_of(rows: Float[Tensor, "*b k"]) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
    """The sign of the largest entry of each row, ±1, and how far it exceeds those of the other sign, of its size (1 for
    a row of zeros)."""
    most, least = rows.amax(-1).clamp_min(0), -rows.amin(-1).clamp_max(0)
    largest = torch.maximum(most, least)
    sure = torch.where(largest > 0, (most - least).abs() / torch.where(largest > 0, largest, 1.0), 1.0)
    return torch.where(least > most, -1.0, 1.0).to(rows.dtype), sure


@dataclass(frozen=True)
class Conformal(Rotations):
    """Orthogonal maps times one positive scale: queries and keys, or values and outputs, of a head.

    best: from the balance of norms, rotation and scale in turns until another turn would gain less than `rtol` of
    |X|² + |Y|²: a stationary point of a problem that is not convex. With `one_pass` the rotation first and then the
    scale, once, as in Zhang et al. 2025, Algorithm 1 and Eq. 11–12: short of it when the norms of the two sides are out
    of balance.
    """

    one_pass: bool = False
    rounds: int = 30
    rtol: float = 1e-6
    below: ClassVar[tuple[str, ...]] = ("orthogonal", "rotary")

    label = "rotation, scale"

    def without_scaling(self) -> Orthogonal:
        return Orthogonal()

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Similarity:
        return Similarity(Orthogonal().random(n, batch, rng).matrix, random_scales(batch, rng))

    def tangent(self, n: int) -> dict[str, tuple[int, ...]]:
        return {"turn": (n, n), "log": ()}

    def near(self, at: Mapping[str, Tensor]) -> Similarity:
        """The Cayley map of the skew part of `turn`, times the exponential of `log`."""
        return Similarity(turned(at["turn"]), at["log"].exp())

    def contains(self, g: Element, atol: float) -> bool:
        q = similar(g)
        if q is None or (q.scale is not None and not positive(q.scale)):
            return False
        return Orthogonal().contains(Similarity(q.matrix), atol)

    def best(self, moments: PartMoments) -> Similarity:
        refuse_plain(moments)
        like = next(iter(moments.values())).xy
        (cx, p, xx), (cy, r, yy) = (terms(moments.get(part), like) for part in ("primal", "dual"))
        batch, n = cx.shape[:-2], cx.shape[-1]
        cx, cy, p, r, xx, yy = (cx.reshape(-1, n, n), cy.reshape(-1, n, n), *(t.reshape(-1) for t in (p, r, xx, yy)))
        if self.one_pass:
            q = polar(cx + cy)
            scale = best_scale(p, _inner(q, cx), r, _inner(q, cy))
            return Similarity(q.reshape(*batch, n, n), scale.reshape(batch))
        q, scale = torch.empty_like(cx), balance(p, r, xx, yy)
        size = p + r + xx + yy
        live = torch.arange(len(p), device=p.device)  # the pairs of which another round may lower the objective
        for _ in range(self.rounds):
            if len(live) == 0:
                break
            enough = self.rtol * size[live]
            q[live], scale[live], gain = _round(cx[live], cy[live], p[live], r[live], scale[live], enough)
            live = live[gain > enough]
        return Similarity(q.reshape(*batch, n, n), scale.reshape(batch))


def _round(
    cx: Tensor, cy: Tensor, p: Tensor, r: Tensor, start: Tensor, enough: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rotation for the scale `start`, the best scale for it, and, where that gains more than `enough`, the rotation
    for this scale; with what another round may gain.

    The rotation for a scale a is the polar factor of N(a) = a C_x + C_y / a. In the basis of the SVD U D Vᵀ = N(a₀)
    that is nearly diagonal, so that a Newton step replaces a second SVD: for S = Uᵀ N(a) V the rotation is U exp(Ω) Vᵀ.
    """
    a = start[:, None, None]
    u, d, vt = bases(a * cx + cy / a)
    nx = u.mT @ cx @ vt.mT
    ny = a * (torch.diag_embed(d) - a * nx)
    scale = best_scale(p, _trace(nx), r, _trace(ny))
    omega, gain = _turning(nx, ny, scale)
    q = u @ vt
    # A turn of more than this is too far for one step, and an infinite gain is out of its reach: another SVD for those.
    near = ((gain > enough) & gain.isfinite() & (omega.abs().amax((1, 2)) < 0.3)).nonzero()[:, 0]
    if len(near):
        w = _cayley(omega[near])
        q[near] = u[near] @ w @ vt[near]
        nx, ny = w.mT @ nx[near], w.mT @ ny[near]
        scale[near] = best_scale(p[near], _trace(nx), r[near], _trace(ny))
        _, gain[near] = _turning(nx, ny, scale[near])
    return q, scale, gain


def _turning(nx: Tensor, ny: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The skew Ω, Ω_ij = (S_ij − S_ji) / (S_ii + S_jj), that turns S = a N_x + N_y / a nearest to symmetry, and what
    the objective gains by it, ½ ⟨S − Sᵀ, Ω⟩: infinite past a zero of a singular value, where a reflection is best."""
    a = scale[:, None, None]
    s = a * nx + ny / a
    diagonal = torch.diagonal(s, dim1=-2, dim2=-1)
    skew = s - s.mT
    stiff = (diagonal[:, :, None] + diagonal[:, None, :]).clamp_min(torch.finfo(s.dtype).tiny)
    omega = torch.where(skew == 0, 0, skew / stiff)
    gain = (skew * omega).sum((1, 2)) / 2
    return omega, torch.where((diagonal < 0).any(1), torch.inf, gain)


def _cayley(omega: Tensor) -> Tensor:
    """The rotation (1 + Ω/2) / (1 − Ω/2), exp(Ω) to second order and exactly orthogonal for every skew Ω."""
    eye = torch.eye(omega.shape[-1], dtype=omega.dtype, device=omega.device)
    turn: Tensor = torch.linalg.solve(eye - omega / 2, eye + omega / 2)
    return turn


def turned(m: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """The rotation that is the Cayley map of the skew part of any matrix; at 0 exactly the identity."""
    return _cayley((m - m.mT) / 2)


def balance(p: Tensor, r: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    """The scale that gives both sides of the source the balance of the anchor's: where to begin; 1 if one is absent."""
    ratio = (xx * r / (yy * p)) ** 0.25
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)


def _trace(m: Tensor) -> Tensor:
    return torch.diagonal(m, dim1=-2, dim2=-1).sum(-1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.linalg.vecdot(a.flatten(-2), b.flatten(-2))
    return product


def terms(m: Moments | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cross-Gram, |Y|² and |X|² of one part; zeros if no tensor has it."""
    if m is None:
        none = like.new_zeros(like.shape[:-2], dtype=torch.float64)
        return torch.zeros_like(like, dtype=torch.float64), none, none
    return m.xy.double(), m.y_norms.double().sum(-1), m.x_norms.double().sum(-1)
