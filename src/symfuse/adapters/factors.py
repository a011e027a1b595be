"""The nearest matrix of low rank, as the two factors of a LoRA layer (Eckart and Young 1936)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symfuse.errors import IncompatibleError
from symfuse.io.tensors import require_fit

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
        return self.residual / self.norm if self.norm else 0.0

    @classmethod
    def zero(cls, shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> Factors:
        """Of that rank, of no difference."""
        down, up = torch.zeros(rank, shape[1], dtype=dtype), torch.zeros(shape[0], rank, dtype=dtype)
        return cls(down, up, 0.0, 0.0, exact=True)


def factorise(module: str, delta: Tensor, rank: int, alpha: int, dtype: torch.dtype, least: int = 1) -> Factors:
    """The factors of a module's difference (out × in, finite, not zero), of at most that rank, less if it has less;
    with zeros up to rank `least`.

    Both factors get the root of the singular values, so that they are of one size when they are rounded to dtype. The
    scale, alpha / rank of these factors, is divided out of B. IncompatibleError, by module, if they are too large or
    too small for dtype.
    """
    exact = min(delta.shape) <= EXACT or 4 * rank >= min(delta.shape)
    # In units of a power of two near the largest number, which is exact, no product overflows or vanishes.
    unit = 2.0 ** (math.frexp(float(torch.linalg.vector_norm(delta, math.inf)))[1] - 1)
    delta = delta / unit
    u, s, vt = torch.linalg.svd(delta, full_matrices=False) if exact else _randomised(delta, rank)
    noise = float(s[0]) * max(delta.shape) * torch.finfo(delta.dtype).eps
    keep = max(1, min(rank, int((s > noise).sum())))
    root, more = s[:keep].double().sqrt(), max(0, least - keep)
    scale = alpha / (keep + more)
    size = math.sqrt(unit)
    up = rounded(f"{module}.lora_B", u[:, :keep] * (root * (size / scale)), dtype)
    down = rounded(f"{module}.lora_A", (root * size)[:, None] * vt[:keep], dtype)
    back = [(up.double() * (scale / size)).to(delta.dtype), (down.double() / size).to(delta.dtype)]
    lost = torch.addmm(delta, *back, alpha=-1)
    up, down = nn.functional.pad(up, (0, more)), nn.functional.pad(down, (0, 0, 0, more))
    return Factors(down, up, unit * _norm(delta), unit * _norm(lost), exact)


def rounded(name: str, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """In that dtype. IncompatibleError, by name, if that has no such large or small numbers."""
    require_fit(name, factor, dtype)
    rounded = factor.to(dtype).contiguous()
    if not rounded.any():
        raise IncompatibleError(
            f"{name}: values up to {float(factor.abs().max()):.3g} are zero in {str(dtype).removeprefix('torch.')}, "
            "the dtype of the adapter; take a wider one (--dtype), or a smaller alpha"
        )
    return rounded


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
