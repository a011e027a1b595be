"""The nearest matrix of low rank, as the two factors of a LoRA layer (Eckart and Young 1936)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1024  # up to this smaller side, a full decomposition costs little
OVERSAMPLING, ITERATIONS = 16, 6


@dataclass(frozen=True)
class Factors:
    """A (rank × in) and B (out × rank) with scale·B·A near a difference. norm: of the difference; residual: of what is
    lost, rounding included; exact: by a full decomposition, else by a randomised one."""

    down: Tensor
    up: Tensor
    norm: float
    residual: float
    exact: bool

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def error(self) -> float:
        """The share of the difference that is lost, by Frobenius norms."""
        return self.residual / self.norm


def factorise(delta: Tensor, rank: int, alpha: int, dtype: torch.dtype) -> Factors:
    """The factors of a difference (out × in, not zero), of at most that rank, less if the difference has less.

    Both factors get the root of the singular values, so that they are of one size when they are rounded to dtype. The
    scale, alpha / rank of these factors, is divided out of B.
    """
    exact = min(delta.shape) <= EXACT or 4 * rank >= min(delta.shape)
    u, s, vt = torch.linalg.svd(delta, full_matrices=False) if exact else _randomised(delta, rank)
    noise = float(s[0]) * max(delta.shape) * torch.finfo(delta.dtype).eps
    keep = max(1, min(rank, int((s > noise).sum())))
    root = s[:keep].sqrt()
    scale = alpha / keep
    up = (u[:, :keep] * (root / scale)).to(dtype).contiguous()
    down = (root[:, None] * vt[:keep]).to(dtype).contiguous()
    lost = torch.addmm(delta, up.to(delta.dtype), down.to(delta.dtype), alpha=-scale)
    return Factors(down, up, _norm(delta), _norm(lost), exact)


def _randomised(delta: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular triplets by iterations on a random subspace (Halko, Martinsson and Tropp 2011, algorithms
    4.4 and 5.1, arXiv 0909.4061). The same numbers at every call."""
    generator = torch.Generator().manual_seed(0)
    width = min(rank + OVERSAMPLING, *delta.shape)
    q = torch.linalg.qr(delta @ torch.randn(delta.shape[1], width, generator=generator, dtype=delta.dtype)).Q
    for _ in range(ITERATIONS):
        q = torch.linalg.qr(delta.T @ q).Q
        q = torch.linalg.qr(delta @ q).Q
    u, s, vt = torch.linalg.svd(q.T @ delta, full_matrices=False)
    return q @ u, s, vt


def _norm(matrix: Tensor) -> float:
    return math.sqrt(float(matrix.double().square().sum()))
