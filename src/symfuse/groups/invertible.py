"""Invertible maps: what may act between queries and keys, and between values and outputs, of a head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.groups.base import Element, Group, Moments, PartMoments
from symfuse.groups.linear import Linear, linear
from symfuse.groups.monomial import random_scales
from symfuse.groups.orthogonal import Conformal, Orthogonal, Similarity, polar, refuse_plain
from symfuse.groups.scale import LIMIT

FLOOR = 1e-12  # of the largest eigenvalue of a Gram matrix: what is below it, is rounding
TRIAL_STEPS, INNER_STEPS, HALVINGS = 3, 5, 12
ROUNDING = 64 * torch.finfo(torch.float64).eps  # of |X|² + |Y|², in an objective


@dataclass(frozen=True)
class Invertible(Group):
    """M with an inverse: all of GL(n).

    best: one part alone is least squares, M = X Yᵀ (Y Yᵀ)⁻¹. Two are not convex. Start: balance both models (T_A for
    the source, T_B for the anchor: T YYᵀ Tᵀ = T⁻ᵀ Y'Y'ᵀ T⁻¹), find the rotation R between them (Zhang et al. 2025,
    Theorem 4.1) and undo the balancing of the anchor, M = T_B⁻¹ R T_A. From there, and from the best conformal map or
    the identity, a few of Newton's steps in M ← (1 + E) M; from the better of the two more, until one gains less than
    `rtol` of |X|² + |Y|², or for `rounds` of them: towards a stationary point, and never worse than any of the three
    starts. On features that a map relates, with noise of up to a third, it was the global optimum in all trials; of
    unrelated heads of two or three units a few in a hundred were left in another minimum.

    Limits: the root mean squares of the singular values of M and of M⁻¹ are at most `LIMIT`.
    """

    rounds: int = 30
    rtol: float = 1e-6
    gram: ClassVar[bool] = True
    below: ClassVar[tuple[str, ...]] = ("conformal", "signed-monomial")

    label = "invertible map"

    def usual(self) -> Conformal:
        return Conformal()

    def without_scaling(self) -> Orthogonal:
        return Orthogonal()

    def random(self, n: int, batch: tuple[int, ...], rng: torch.Generator) -> Linear:
        u, v = (Orthogonal().random(n, batch, rng).matrix for _ in range(2))
        scale = random_scales((*batch, n), rng)[..., None, :]
        return Linear((u * scale) @ v.mT, (v / scale) @ u.mT)

    def tangent(self, n: int) -> dict[str, tuple[int, ...]]:
        return {"log": (n, n)}

    def near(self, at: Mapping[str, Tensor]) -> Linear:
        """The exponential of `log`, and its inverse (half the time of another exponential)."""
        matrix = torch.linalg.matrix_exp(at["log"])
        return Linear(matrix, torch.linalg.inv(matrix))

    def identity(self, n: int, batch: tuple[int, ...]) -> Linear:
        eye = Orthogonal().identity(n, batch).matrix
        return Linear(eye, eye)

    def contains(self, g: Element, atol: float) -> bool:
        """Whether M M⁻¹ = 1 to within atol times the condition of M."""
        if isinstance(g, Similarity):  # which has an inverse only if its matrix is orthogonal and its scale positive
            return Conformal().contains(g, atol)
        g = linear(g)
        m, w = g.matrix, g.inverse_matrix
        condition = (_norm(m) * _norm(w) / g.size)[..., None, None]
        error = (m @ w - torch.eye(g.size, dtype=m.dtype, device=m.device)).abs()
        return bool(condition.isfinite().all() and (error <= atol * condition).all())

    def best(self, moments: PartMoments) -> Linear:
        refuse_plain(moments)
        parts = list(moments.values())
        if not all(m.full for m in parts):
            raise SymmetryError("the best invertible map needs X Xᵀ and Y Yᵀ, not their diagonals (`Group.gram`)")
        n, batch = parts[0].xy.shape[-1], parts[0].xy.shape[:-2]
        size = torch.stack([m.size for m in parts]).sum(0).reshape(-1, 1, 1)
        size = torch.where(size > 0, size, 1.0)
        flat = {part: _scaled(m, size) for part, m in moments.items()}
        problem = _Problem.of(flat)
        conformal = Conformal().best(flat)
        starts = [self.identity(n, size.shape[:1]).to(size.device).matrix, conformal.to_dense()]
        if len(flat) == 1:
            ((part, m),) = flat.items()
            matrix = _least_squares(m, conformal.part(part).to_dense())
            solution = _least(problem, [matrix if part == "primal" else torch.linalg.inv(matrix).mT, *starts])
        else:
            starts = [_least(problem, starts), _balanced(flat["primal"], flat["dual"])]
            tried = [_refined(problem, start, min(TRIAL_STEPS, self.rounds), self.rtol) for start in starts]
            solution = _refined(problem, _least(problem, tried), self.rounds, self.rtol)
        return Linear(solution.reshape(*batch, n, n), torch.linalg.inv(solution).reshape(*batch, n, n))


@dataclass(frozen=True)
class _Problem:
    """f(M) = |X − M Y|² + |X' − M⁻ᵀ Y'|² for each of h heads, up to a constant: XYᵀ, YYᵀ, X'Y'ᵀ and Y'Y'ᵀ."""

    cx: Float[Tensor, "h n n"]
    gx: Float[Tensor, "h n n"]
    cy: Float[Tensor, "h n n"]
    gy: Float[Tensor, "h n n"]

    @classmethod
    def of(cls, moments: PartMoments) -> _Problem:
        none = torch.zeros_like(next(iter(moments.values())).xy)
        terms = [(m.xy, m.yy) if (m := moments.get(part)) else (none, none) for part in ("primal", "dual")]
        return cls(*terms[0], *terms[1])

    def __getitem__(self, at: Tensor) -> _Problem:
        return _Problem(self.cx[at], self.gx[at], self.cy[at], self.gy[at])

    def cost(self, m: Tensor, w: Tensor) -> Tensor:
        """f at M with the inverse W; infinite outside of the limits."""
        wt = w.mT
        value = _inner(m @ self.gx - 2 * self.cx, m) + _inner(wt @ self.gy - 2 * self.cy, wt)
        cost: Tensor = torch.where(_within(m, w) & value.isfinite(), value, torch.inf)
        return cost

    def step(self, m: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Newton's E in M ← (1 + E) M, and ½ of what it promises to first order, ⟨J − K, E⟩, both for all heads.

        With Ỹ = M Y and Ỹ' = M⁻ᵀ Y', J = (X − Ỹ) Ỹᵀ and K = Ỹ' (X' − Ỹ')ᵀ, f is to second order
            f₀ − 2⟨J − K, E⟩ + ⟨E, E ỸỸᵀ + Ỹ'Ỹ'ᵀ E⟩ − 2⟨E E, K⟩.
        In the bases of the eigenvectors of the two Gram matrices the middle term, Gauss and Newton's, is diagonal.
        """
        gx, gy = m @ self.gx @ m.mT, w.mT @ self.gy @ w
        k = (self.cy @ w).mT - gy
        (b, v), (a, u) = torch.linalg.eigh(gx), torch.linalg.eigh(gy)
        stiff = a.clamp_min(0)[:, :, None] + b.clamp_min(0)[:, None, :]
        floor = (FLOOR * stiff.amax((1, 2), keepdim=True)).clamp_min(torch.finfo(stiff.dtype).tiny)
        stiff = torch.maximum(stiff, floor)
        turned, between = u.mT @ k @ v, u.mT @ v
        right = u.mT @ (self.cx @ m.mT - gx) @ v - turned

        def curvature(e: Tensor) -> Tensor:
            et = e.mT
            out: Tensor = stiff * e - turned @ et @ between - between @ et @ turned
            return out

        e = _conjugate_gradients(curvature, stiff, right)
        step: Tensor = u @ e @ v.mT
        return step, _inner(right, e)


def _conjugate_gradients(curvature: Callable[[Tensor], Tensor], stiff: Tensor, right: Tensor) -> Tensor:
    """Roughly H⁻¹ right, preconditioned by the diagonal `stiff`; up to where H is not positive (Steihaug 1983)."""
    e, rest = torch.zeros_like(right), right
    direction = rest / stiff
    square = _inner(rest, direction)
    enough = square * torch.minimum(square, torch.full_like(square, 1e-2))  # ever more exact: superlinear convergence
    going = square > 0
    for i in range(INNER_STEPS):
        image = curvature(direction)
        curved = _inner(direction, image)
        if i == 0:  # at worst the gradient, as far as Gauss and Newton would go along it
            e = torch.where((curved <= 0)[:, None, None], direction, e)
        going &= curved > 0
        length = torch.where(going, square / curved, 0.0)[:, None, None]
        e, rest = e + length * direction, rest - length * image
        steep = rest / stiff
        before, square = square, _inner(rest, steep)
        going &= square > enough
        if not bool(going.any()):
            break
        direction = steep + torch.where(going, square / before, 0.0)[:, None, None] * direction
    return e


def _refined(problem: _Problem, start: Tensor, rounds: int, rtol: float) -> Tensor:
    """A stationary point of f below `start`, by Newton's method with conjugate gradients and halved steps."""
    out = start.clone()
    live = torch.arange(len(start), device=start.device)
    for _ in range(rounds):
        if len(live) == 0:
            break
        m = out[live]
        here = problem[live]
        w = torch.linalg.inv(m)
        e, promise = here.step(m, w)
        out[live], gain = _shortened(here, m, w, e, promise)
        live = live[gain > rtol]
    return out


def _shortened(problem: _Problem, m: Tensor, w: Tensor, e: Tensor, promise: Tensor) -> tuple[Tensor, Tensor]:
    """(1 + t E) M for the first t = 1, ½, ¼ … that lowers f by its share (Armijo 1966), else M; and what it gains."""
    before = problem.cost(m, w)
    out, gain, e = m.clone(), torch.zeros_like(before), e @ m
    left = torch.arange(len(m), device=m.device)
    for i in range(HALVINGS):
        t = 0.5**i
        new = m[left] + t * e[left]
        inverse, _ = torch.linalg.inv_ex(new)
        gained = before[left] - problem[left].cost(new, inverse)
        lower = gained >= 1e-4 * t * promise[left] - ROUNDING
        out[left[lower]], gain[left[lower]] = new[lower], gained[lower]
        left = left[~lower]
        if len(left) == 0:
            break
    return out, gain


def _least(problem: _Problem, candidates: list[Tensor]) -> Tensor:
    """For each head the candidate with the least f; of equals, up to rounding, the first."""
    best, cost = candidates[0], torch.full_like(candidates[0][:, 0, 0], torch.inf)
    for other in candidates:
        value = problem.cost(other, torch.linalg.inv_ex(other).inverse)
        better = value < cost - ROUNDING
        best, cost = torch.where(better[:, None, None], other, best), torch.where(better, value, cost)
    return best


def _least_squares(m: Moments, unseen: Tensor) -> Tensor:
    """argmin over M of |X − M Y|² = X Yᵀ (Y Yᵀ)⁺, where Y says nothing as `unseen` maps it; singular values within
    the limits."""
    values, vectors = torch.linalg.eigh(m.yy)
    seen = (values > FLOOR * values[:, -1:]) & (values > 0)
    inverse = torch.where(seen, 1 / values, 0.0)[:, None, :]
    mapped = (m.xy @ vectors) * inverse + (unseen @ vectors) * ~seen[:, None, :]
    u, s, vt = torch.linalg.svd(mapped @ vectors.mT)
    out: Tensor = (u * s.clamp(1 / LIMIT, LIMIT)[:, None, :]) @ vt
    return out


def _balanced(primal: Moments, dual: Moments) -> Tensor:
    """T_B⁻¹ R T_A: the rotation between both models in their balanced bases, with the anchor's balancing undone."""
    (ta, ua), (tb, ub) = _balance(primal.yy, dual.yy), _balance(primal.xx, dual.xx)
    return ub @ polar(tb @ primal.xy @ ta.mT + ub.mT @ dual.xy @ ua) @ ta


def _balance(g: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """T with T G Tᵀ = T⁻ᵀ K T⁻¹, and T⁻¹.

    TᵀT is the geometric mean of G⁻¹ and K (Bhatia 2007, Chapter 4), and T is that up to a rotation:
    T = D^¼ Vᵀ G^-½ with G^½ K G^½ = V D Vᵀ. Both sides of a singular pair are lifted to a floor.
    """
    values, vectors = torch.linalg.eigh(g)
    root = _lifted(values).sqrt()[:, None, :]
    half = (vectors * root) @ vectors.mT
    middle, v = torch.linalg.eigh(half @ k @ half)
    fourth = _lifted(middle).sqrt().sqrt()[:, None, :]
    return (v * fourth).mT @ (vectors / root) @ vectors.mT, half @ (v / fourth)


def _lifted(values: Tensor) -> Tensor:
    """Eigenvalues in ascending order, none below the floor; 1 where all are zero."""
    largest = values[:, -1:]
    return torch.where(largest > 0, torch.maximum(values, FLOOR * largest), 1.0).clamp_min(1e-280)


def _scaled(m: Moments, size: Tensor) -> Moments:
    """Moments as [h, n, n], float64, of models whose squared norms are 1 together."""
    n = m.xy.shape[-1]
    return Moments(*(t.double().reshape(-1, n, n) / size for t in (m.xy, m.xx, m.yy)))


def _within(m: Tensor, w: Tensor) -> Tensor:
    """Whether M and M⁻¹ = W are of a size at which a float32 network still computes the same function."""
    most = LIMIT * math.sqrt(m.shape[-1])
    return (_norm(m) <= most) & (_norm(w) <= most)


def _norm(m: Tensor) -> Tensor:
    return m.square().sum((-2, -1)).sqrt()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))
