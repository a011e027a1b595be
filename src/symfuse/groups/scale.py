"""The best positive scale of a pair in which one side moves by a and the other by 1/a, in closed form.

Source: Zhang et al. 2025, Eq. 11–12; the stationary points of

    f(a) = p a² − 2 q a + r/a² − 2 s/a        (p = |y|², q = ⟨x, y⟩, r = |y'|², s = ⟨x', y'⟩)

are the positive roots of p a⁴ − q a³ + s a − r. There can be three: the one with the least f is taken.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

# A side that is zero, or pairs so opposed that the optimum runs away to 0 or ∞, leaves the scale unbounded:
# scales stay within a factor of 2¹⁰ of 1, where a float32 network still computes the same function.
LIMIT = 1024.0
NEWTON_STEPS = 12

Reals = NDArray[np.float64]
Array = TypeVar("Array", Tensor, Reals)


def scale_cost(a: Array, p: Array, q: Array, r: Array, s: Array) -> Array:
    """f(a), without the terms that do not depend on a."""
    square = a * a
    return p * square - 2 * q * a + r / square - 2 * s / a


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
    with np.errstate(all="ignore"):
        scales = _best(torch.stack([t.double().reshape(-1) for t in (p, q, s, r)]).cpu().numpy())
    return torch.as_tensor(scales, device=p.device).reshape(p.shape)


def _best(terms: Reals) -> Reals:
    """terms: p, q, s, r. For dozens of steps on small arrays NumPy takes half the time. The roots are LAPACK's, matrix
    by matrix."""
    p, q, s, r = terms
    inverted, leading = r > p, terms.copy()
    leading[:, inverted] = terms[::-1, inverted]
    rest = leading[1:] / np.where(leading[0] > 0, leading[0], 1)
    companion = np.zeros((len(p), 4, 4))
    companion[:, (1, 2, 3), (0, 1, 2)] = 1
    for row, sign, entry in zip((3, 1, 0), (1, -1, 1), np.minimum(np.maximum(rest, -1e60), 1e60), strict=True):
        companion[:, row, 3] = sign * entry
    roots = torch.linalg.eigvals(torch.from_numpy(companion)).numpy()
    real = (np.abs(roots.imag) <= 1e-6 * np.abs(roots.real)) & (roots.real > 0)
    roots = np.where(real, roots.real, 1.0)
    roots[inverted] = 1 / roots[inverted]
    candidates = np.empty((len(p), 8))
    candidates[:, :3] = 1, LIMIT, 1 / LIMIT
    candidates[:, 3] = np.where(q * s > 0, np.sqrt(np.abs(s / q)), 1.0)
    candidates[:, 4:] = roots
    candidates = np.minimum(np.maximum(candidates, 1 / LIMIT), LIMIT)
    costs = scale_cost(candidates, p[:, None], q[:, None], r[:, None], s[:, None])
    best: Reals = candidates[np.arange(len(p)), costs.argmin(1)]  # of equals, the first: 1
    return best


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
            bb, cc = b * b, c * c
            slope = bb - cc - across * b + along * c
            curvature = 2 * bb + 2 * cc - across * b - along * c
            u = u - (slope / curvature.abs().clamp_min(1e-3)).clamp(-1, 1)
        a = (u.exp() * balance).clamp(1 / LIMIT, LIMIT)
        best = torch.minimum(best, scale_cost(a, p, q, r, s))
    return best
