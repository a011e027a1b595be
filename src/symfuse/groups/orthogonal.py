"""Rotations (reflections included) and rotations with one positive scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.groups.base import Element, Group, Moments, PartMoments, total
from symfuse.groups.monomial import positive, random_scales
from symfuse.groups.scale import best_scale

_NO_PERMUTATION_PART = (
    "a rotation has no permutation part: an axis that some tensor has as |axis| (a norm gain, a gate) cannot "
    "be rotated; fold the gain first, or choose a permutation for this axis"
)


def _refuse_plain(moments: PartMoments) -> None:
    if "plain" in moments:
        raise SymmetryError(_NO_PERMUTATION_PART)


@dataclass(frozen=True, eq=False)
class Similarity(Element):
    """w → scale · Q w with Q orthogonal; its dual is w → Q w / scale."""

    matrix: Float[Tensor, "*b n n"]
    scale: Float[Tensor, "*b"] | None = None

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape[:-2])

    def act(self, w: Tensor, dim: int) -> Tensor:
        k = len(self.batch)
        q = self.matrix if self.scale is None else self.matrix * self.scale[..., None, None]
        moved = w.movedim(dim, k)
        rows = moved.reshape(*moved.shape[: k + 1], -1)
        return (q.to(w.dtype) @ rows).reshape(moved.shape).movedim(k, dim)

    def dual(self) -> Similarity:
        return Similarity(self.matrix, None if self.scale is None else 1 / self.scale)

    def forget(self) -> Similarity:
        raise SymmetryError(_NO_PERMUTATION_PART)

    def inverse(self) -> Similarity:
        return Similarity(self.matrix.transpose(-1, -2), None if self.scale is None else 1 / self.scale)

    def __matmul__(self, other: Similarity) -> Similarity:
        scales = [g.scale for g in (self, other) if g.scale is not None]
        scale = scales[0] * scales[1] if len(scales) == 2 else (scales[0] if scales else None)
        return Similarity(self.matrix @ other.matrix, scale)

    def inner(self, c: Tensor) -> Tensor:
        value = (self.matrix.double() * c.double()).sum((-2, -1))
        return value if self.scale is None else value * self.scale.double()

    def gain(self, yy: Tensor) -> Tensor:
        return yy.sum(-1) if self.scale is None else yy.sum(-1) * self.scale.to(yy.dtype) ** 2

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix} | ({} if self.scale is None else {"scale": self.scale})

    def rebuild(self, tensors: Mapping[str, Tensor]) -> Similarity:
        return Similarity(tensors["matrix"], tensors.get("scale"))

    @property
    def reorders_only(self) -> bool:
        return False

    def is_identity(self) -> bool:
        fixed = bool((self.matrix == torch.eye(self.size, dtype=self.matrix.dtype)).all())
        return fixed and (self.scale is None or bool((self.scale == 1).all()))


def polar(c: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """argmax over Q in O(n) of ⟨Q, C⟩ = U Vᵀ, where C = U Σ Vᵀ (Schönemann 1966)."""
    u, _, vt = torch.linalg.svd(c)
    q: Tensor = u @ vt
    return q


class Orthogonal(Group):
    """Q with Qᵀ Q = 1, reflections included.

    best: the polar factor of C, the sum of all cross-Grams (Zhang et al. 2025, Theorem 4.1).
    """

    self_dual: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "rotation"

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Similarity:
        q, r = torch.linalg.qr(torch.randn(*batch, n, n, generator=rng, dtype=torch.float64))
        return Similarity(q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1))[..., None, :])  # Haar measure

    def identity(self, n: int, batch: tuple[int, ...]) -> Similarity:
        return Similarity(torch.eye(n, dtype=torch.float64).expand(*batch, n, n))

    def contains(self, g: Element, atol: float) -> bool:
        if not isinstance(g, Similarity) or (g.scale is not None and not bool(((g.scale - 1).abs() <= atol).all())):
            return False
        gram = g.matrix.transpose(-1, -2) @ g.matrix
        return bool(((gram - torch.eye(g.size, dtype=gram.dtype)).abs() <= atol).all())

    def best(self, moments: PartMoments) -> Similarity:
        _refuse_plain(moments)
        return Similarity(polar(total(moments).xy))


@dataclass(frozen=True)
class Conformal(Group):
    """Orthogonal maps times one positive scale: queries and keys, or values and outputs, of a head.

    best: rotation and scale in turns until the objective stops falling; with `one_pass` the rotation first
    and then the scale, once, as in Zhang et al. 2025, Algorithm 1 and Eq. 11–12 (not the joint optimum when
    the norms of the two sides are out of balance).
    """

    one_pass: bool = False
    steps: int = 50
    turns: int = 8
    large: int = 32
    rtol: float = 1e-9

    @property
    def label(self) -> str:
        return "rotation, scale"

    def without_scaling(self) -> Orthogonal:
        return Orthogonal()

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Similarity:
        return Similarity(Orthogonal().random(n, batch, rng).matrix, random_scales(batch, rng))

    def identity(self, n: int, batch: tuple[int, ...]) -> Similarity:
        return Orthogonal().identity(n, batch)

    def contains(self, g: Element, atol: float) -> bool:
        if not isinstance(g, Similarity) or (g.scale is not None and not positive(g.scale)):
            return False
        return Orthogonal().contains(Similarity(g.matrix), atol)

    def best(self, moments: PartMoments) -> Similarity:
        _refuse_plain(moments)
        like = next(iter(moments.values())).xy
        (cx, p, xx), (cy, r, yy) = (_terms(moments.get(part), like) for part in ("primal", "dual"))
        batch, n = cx.shape[:-2], cx.shape[-1]
        cx, cy, p, r, xx, yy = (
            cx.reshape(-1, n, n),
            cy.reshape(-1, n, n),
            *(t.reshape(-1) for t in (p, r, xx, yy)),
        )
        if self.one_pass:
            q = polar(cx + cy)
            scale = best_scale(p, _inner(q, cx), r, _inner(q, cy))
            return Similarity(q.reshape(*batch, n, n), scale.reshape(batch))
        # A guess saves SVDs of large heads. From 1 the objective falls from that of one pass, whatever the features.
        guess = n >= self.large
        q, scale = torch.empty_like(cx), _likely_scale(cx, cy, p, r, xx, yy) if guess else torch.ones_like(p)
        cold = torch.arange(len(p))  # the pairs whose rotation is still far from the one for their scale
        for _ in range(self.steps):
            if len(cold) == 0:
                break
            args = (cx[cold], cy[cold], p[cold], r[cold], scale[cold])
            q[cold], scale[cold], far = self._refine(*args, guess)
            cold = cold[far]
            if guess:  # it was far off for these
                guess, scale[cold] = False, 1.0
        return Similarity(q.reshape(*batch, n, n), scale.reshape(batch))

    def _refine(
        self, cx: Tensor, cy: Tensor, p: Tensor, r: Tensor, scale: Tensor, guessed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From the SVD at the given scale, alternate; -> rotation, scale, and where another SVD is needed.

        The rotation for a scale a is the polar factor of N(a) = a C_x + C_y / a. In the basis of the SVD
        U D Vᵀ = N(a₀) that is nearly diagonal, so a Newton step replaces the next SVD: with S = Wᵀ N, the
        best rotation is W exp(Ω), Ω_ij ≈ (S_ij − S_ji) / (S_ii + S_jj), for a twentieth of the cost.
        With a scale that is guessed well, the first step takes the best scale and its rotation at once.
        """
        u, d, vt = torch.linalg.svd(scale[:, None, None] * cx + cy / scale[:, None, None])
        q, far, start = u @ vt, torch.zeros(len(p), dtype=torch.bool), scale
        tx, ty = _inner(q, cx), _inner(q, cy)
        # A rotation that follows the scale gains at most about (a − a₀)² |Y|²: often nothing.
        slope = p * start**2 - tx * start + ty / start - r / start**2
        if guessed and bool((slope**2 <= self.rtol * (p * start**2 + r / start**2) ** 2).all()):
            return q, best_scale(p, tx, r, ty), far
        size = p + r + 2 * d.sum(-1)
        nx = u.mT @ cx @ vt.mT
        ny = start[:, None, None] * (torch.diag_embed(d) - start[:, None, None] * nx)
        turn, live = torch.eye(cx.shape[-1], dtype=cx.dtype).repeat(len(p), 1, 1), torch.arange(len(p))
        if guessed:
            scale, omega, gain, far = _jump(nx, d, p, r, tx, ty, start)
            live = live[(gain > self.rtol * size) & ~far]
            turn[live] = _cayley(omega[live])
        else:
            scale = best_scale(p, tx, r, ty)
        turned = live
        for _ in range(self.turns if len(live) else 0):
            a = scale[live, None, None]
            s = turn[live].mT @ (a * nx[live] + ny[live] / a)
            omega, gain = _turning(s, torch.diagonal(s, dim1=1, dim2=2), size[live])
            moving = gain > self.rtol * size[live]
            large = moving & (omega.abs().amax((1, 2)) > 0.3) | self._crossed(s, size[live])
            far[live[large]] = True
            moving &= ~large
            live, omega = live[moving], omega[moving]
            if len(live) == 0:
                break
            turn[live] = turn[live] @ _cayley(omega)
            scale[live] = best_scale(p[live], _inner(turn[live], nx[live]), r[live], _inner(turn[live], ny[live]))
        far[live] = True
        q[turned] = u[turned] @ turn[turned] @ vt[turned]
        return q, scale, far

    def _crossed(self, s: Tensor, size: Tensor) -> Tensor:
        """Where S = Wᵀ N is not positive: a singular value passed through zero, the best rotation became a
        reflection (or back), and no turn leads there."""
        slack = (self.rtol / 4 * size)[:, None].expand(s.shape[:2])
        info: Tensor = torch.linalg.cholesky_ex(s + torch.diag_embed(slack)).info
        return info > 0


def _turning(s: Tensor, diagonal: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Ω that turns S nearest to symmetry, and what the objective gains by it, to second order."""
    skew = s - s.mT
    omega = skew / (diagonal[:, :, None] + diagonal[:, None, :]).clamp_min(1e-12 * size[:, None, None])
    return omega, (skew * omega).sum((1, 2)) / 2


def _jump(
    nx: Tensor, d: Tensor, p: Tensor, r: Tensor, tx: Tensor, ty: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best scale near `start` while the rotation follows; -> scale, Ω of the turn, its gain, and where too far.

    In the basis of the SVD at a₀, N(a) is h N_x off the diagonal, h = a − a₀²/a. So the turn is h Ω and gains h² k,
    with Ω and k those of N_x: as if |Y|² were less by k on one side, and by k a₀⁴ on the other.
    """
    omega, k = _turning(nx, d, p + r)
    scale = best_scale((p - k).clamp_min(p / 2), tx, (r - k * start**4).clamp_min(r / 2), ty)
    h = scale - start**2 / scale
    omega = h[:, None, None] * omega
    far = (omega.abs().amax((1, 2)) > 0.3) | (4 * k > p) | (4 * k * start**4 > r)
    return scale, omega, h**2 * k, far


def _cayley(omega: Tensor) -> Tensor:
    """A rotation by about the skew Ω, exactly orthogonal; in a plane, by the angle whose tangent is ω."""
    half = omega / (1 + (1 + omega**2).sqrt())
    eye = torch.eye(omega.shape[-1], dtype=omega.dtype)
    turn: Tensor = torch.linalg.solve(eye - half, eye + half)
    return turn


def _likely_scale(cx: Tensor, cy: Tensor, p: Tensor, r: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    """A guess at the scale, before any rotation is known; where a side is absent, 1.

    In the balance of the anchor's norms both sides are taken to correlate alike, and that much as a Gaussian matrix
    would that is as large as the cross-Gram: its nuclear norm is 8 / 3π √n times its Frobenius norm.
    """
    balance = (xx * r / (yy * p)) ** 0.25
    balance = torch.where(balance.isfinite() & (balance > 0), balance, 1.0)
    a = balance[:, None, None]
    x, y = (p * xx).sqrt(), (r * yy).sqrt()
    nuclear = 8 / (3 * math.pi) * cx.shape[-1] ** 0.5 * torch.linalg.matrix_norm(a * cx + cy / a)
    bound = balance * x + y / balance
    correlation = torch.where(bound > 0, nuclear / bound, 1.0).clamp_max(1)
    return best_scale(p, correlation * x, r, correlation * y)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))


def _terms(m: Moments | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cross-Gram, |Y|² and |X|² of one part; zeros if no tensor has it."""
    if m is None:
        none = torch.zeros(like.shape[:-2], dtype=torch.float64)
        return torch.zeros_like(like, dtype=torch.float64), none, none
    return m.xy.double(), m.yy.double().sum(-1), m.xx.double().sum(-1)
