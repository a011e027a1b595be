"""The best positive scale of a pair in which one side moves by a and the other by 1/a, in closed form.

Source: Zhang et al. 2025, Eq. 11–12; the stationary points of

    f(a) = p a² − 2 q a + r/a² − 2 s/a        (p = |y|², q = ⟨x, y⟩, r = |y'|², s = ⟨x', y'⟩)

are the positive roots of p a⁴ − q a³ + s a − r. There can be three: the one with the least f is taken.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

# A side that is zero, or pairs so opposed that the optimum runs away to 0 or ∞, leaves the scale unbounded:
# scales stay within a factor of 2¹⁰ of 1, where a float32 network still computes the same function.
LIMIT = 1024.0
NEWTON_STEPS = 12


def scale_cost(a: Tensor, p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """f(a), without the terms that do not depend on a."""
    return p * a**2 - 2 * q * a + r / a**2 - 2 * s / a


def best_scale(
    p: Float[Tensor, "*b"], q: Float[Tensor, "*b"], r: Float[Tensor, "*b"], s: Float[Tensor, "*b"]
) -> Float[Tensor, "*b"]:
    """argmin over a in [1/LIMIT, LIMIT] of f(a), float64, all quartics in one batch.

    p and r are squared norms: where one is zero, so is its q or s. The roots are the eigenvalues of companion
    matrices, of the quartic in a or in 1/a, whichever has the larger leading coefficient: so sides that
    differ by any factor, and a side that is absent, lose no root. Candidates too are 1, so that the result is
    never worse than leaving the scale as it is, the two limits, and √(s/q), which is all that counts where
    the anchor dwarfs the source.
    """
    p, q, r, s = torch.stack([t.double() for t in (p, q, r, s)])
    inverted = (r > p)[..., None]
    terms = torch.where(inverted, torch.stack((r, s, q, p), -1), torch.stack((p, q, s, r), -1))
    lead = terms[..., :1]
    rest = (terms[..., 1:] / torch.where(lead > 0, lead, torch.ones_like(lead))).clamp(-1e60, 1e60)
    companion = torch.zeros(*p.shape, 4, 4, dtype=torch.float64)
    companion[..., 1, 0] = companion[..., 2, 1] = companion[..., 3, 2] = 1
    companion[..., 3, 3], companion[..., 1, 3], companion[..., 0, 3] = (
        rest[..., 0],
        -rest[..., 1],
        rest[..., 2],
    )
    roots = torch.linalg.eigvals(companion)
    real = (roots.imag.abs() <= 1e-6 * roots.real.abs()) & (roots.real > 0)
    roots = torch.where(real, roots.real, torch.ones_like(roots.real))
    roots = torch.where(inverted, 1 / roots, roots)
    one = torch.ones_like(p)
    between = torch.where(q * s > 0, (s / q).abs().sqrt(), one)
    fixed = torch.stack((one, one * LIMIT, one / LIMIT, between), -1)
    candidates = torch.cat((fixed, roots), -1).clamp(1 / LIMIT, LIMIT)
    costs = scale_cost(candidates, *(t[..., None] for t in (p, q, r, s)))
    return candidates.gather(-1, costs.argmin(-1, keepdim=True))[..., 0]  # of equals, the first: 1


def least_cost(
    p: Float[Tensor, "*b"], q: Float[Tensor, "*b"], r: Float[Tensor, "*b"], s: Float[Tensor, "*b"]
) -> Float[Tensor, "*b"]:
    """min over a in [1/LIMIT, LIMIT] of f(a), float64: `best_scale` without the scale, a tenth of its time.

    To score all pairs of many units. Newton's method in log a, with steps of at most 1, from the balance (r/p)^¼ of the
    two sides and from above and below: where one of its four terms dwarfs the others, f has its minimum there.
    """
    p, q, r, s = torch.stack([t.double() for t in (p, q, r, s)])
    tiny = torch.finfo(p.dtype).tiny
    balance = ((r + 1e-24 * p).clamp_min(tiny) / (p + 1e-24 * r).clamp_min(tiny)) ** 0.25
    k = ((p + 1e-24 * r) * (r + 1e-24 * p)).sqrt().clamp_min(tiny)
    across, along = q * balance / k, s / (balance * k)
    limits = [scale_cost(torch.full_like(p, a), p, q, r, s) for a in (1, LIMIT, 1 / LIMIT)]
    best = torch.stack(limits).amin(0)
    for u in (across.clamp_min(4).log(), torch.zeros_like(p), -along.clamp_min(4).log()):
        for _ in range(NEWTON_STEPS):
            b, c = u.exp(), (-u).exp()
            slope = b**2 - c**2 - across * b + along * c
            curvature = 2 * b**2 + 2 * c**2 - across * b - along * c
            u = u - (slope / curvature.abs().clamp_min(1e-3)).clamp(-1, 1)
        a = (u.exp() * balance).clamp(1 / LIMIT, LIMIT)
        best = torch.minimum(best, scale_cost(a, p, q, r, s))
    return best
