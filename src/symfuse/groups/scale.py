"""The best positive scale of a pair in which one side moves by a and the other by 1/a, in closed form.

Source: Zhang et al. 2025, Eq. 11–12; the stationary points of

    f(a) = p a² − 2 q a + r/a² − 2 s/a        (p = |y|², q = ⟨x, y⟩, r = |y'|², s = ⟨x', y'⟩)

are the positive roots of p a⁴ − q a³ + s a − r. There can be three of them: the one with the least f is taken.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

# A side that is zero, or pairs so opposed that the optimum runs away to 0 or ∞, leaves the scale unbounded:
# scales stay within a factor of 2¹⁰ of 1, where a float32 network still computes the same function.
LIMIT = 1024.0


def scale_cost(a: Tensor, p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """f(a), without the terms that do not depend on a."""
    return p * a**2 - 2 * q * a + r / a**2 - 2 * s / a


def best_scale(
    p: Float[Tensor, "*b"], q: Float[Tensor, "*b"], r: Float[Tensor, "*b"], s: Float[Tensor, "*b"]
) -> Float[Tensor, "*b"]:
    """argmin over a in [1/LIMIT, LIMIT] of f(a), float64, all quartics in one batch.

    The roots are the eigenvalues of companion matrices. Among them, 1 and the two limits are candidates too,
    so that the result is never worse than leaving the scale as it is.
    """
    p, q, r, s = (t.double() for t in (p, q, r, s))
    # With p or r zero (a side that is absent) the quartic loses its first or last coefficient.
    safe = torch.where(p > 0, p, torch.ones_like(p))
    companion = torch.zeros(*p.shape, 4, 4, dtype=torch.float64)
    companion[..., 1, 0] = companion[..., 2, 1] = companion[..., 3, 2] = 1
    companion[..., 0, 3] = r / safe
    companion[..., 1, 3] = -s / safe
    companion[..., 3, 3] = q / safe
    roots = torch.linalg.eigvals(companion)
    real = (roots.imag.abs() <= 1e-6 * roots.real.abs()) & (roots.real > 0)
    candidates = torch.where(real, roots.real, torch.ones_like(roots.real))
    # p = 0: the stationary point of r/a² − 2s/a is a = r/s.
    without = torch.where((p <= 0) & (s > 0), r / torch.where(s > 0, s, torch.ones_like(s)), torch.ones_like(s))
    fixed = [without, torch.ones_like(p), torch.full_like(p, LIMIT), torch.full_like(p, 1 / LIMIT)]
    candidates = torch.cat([candidates, torch.stack(fixed, -1)], -1).clamp(1 / LIMIT, LIMIT)
    costs = scale_cost(candidates, *(t[..., None] for t in (p, q, r, s)))
    # `fixed` holds 1 at offset 5; ties (everything zero) keep it.
    best = costs.argmin(-1, keepdim=True)
    tied = costs[..., 5:6] <= costs.gather(-1, best)
    best = torch.where(tied, torch.full_like(best, 5), best)
    return candidates.gather(-1, best)[..., 0]
