"""Coordinates in which updates of low rank are merged, and back: the update scale·B·A of a module is L M R, M being its
coordinates, L (out × a) with orthonormal columns, R (b × in) with orthonormal rows, the same for all adapters.

"core": L and R span what all B write and all A read (Panariello et al. 2025, Core Space, arXiv 2509.17786, section 4):
the left singular vectors of [s₁B₁ … s_kB_k], and the right ones of A₁ … A_k below each other.
"knots": L alone, the left singular vectors of [ΔW₁ … ΔW_k] (Stoica et al. 2024, KnOTS, arXiv 2410.19735, section 4),
so that M = S Vᵢᵀ.
"full": neither, M = ΔW.
A method that is linear has the same result in all of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symfuse.adapters.factors import Factors, factorise, rounded

SPACES = ("core", "knots", "full", "factors")
Pair = tuple[Tensor, Tensor]  # A (rank × in) and scale·B (out × rank)


@dataclass(frozen=True)
class Space:
    """L and R of one module; None: the identity."""

    left: Tensor | None = None
    right: Tensor | None = None

    @classmethod
    def of(cls, kind: str, pairs: Sequence[Pair]) -> Space:
        """Of the pairs of all adapters that change the module."""
        if kind == "full":
            return cls()
        downs, ups = [down for down, _ in pairs], [up for _, up in pairs]
        if kind == "knots":
            # ΔWᵢ = (sBᵢ Rᵢᵀ) Qᵢᵀ, with orthonormal columns of Qᵢ, which do not change the left singular vectors.
            narrow = [up @ torch.linalg.qr(down.T).R.T for down, up in pairs]
            return cls(left=torch.linalg.svd(torch.cat(narrow, 1), full_matrices=False).U)
        return cls(
            torch.linalg.svd(torch.cat(ups, 1), full_matrices=False).U,
            torch.linalg.svd(torch.cat(downs), full_matrices=False).Vh,
        )

    def coordinates(self, pair: Pair) -> Tensor:
        """M of one update."""
        down, up = pair
        up = up if self.left is None else self.left.T @ up
        return up @ (down if self.right is None else down @ self.right.T)

    def factors(self, module: str, merged: Tensor, exact: Tensor, rank: int, alpha: int) -> Factors:
        """The nearest factors of L·merged·R of at most that rank, in float64, of scale alpha / their rank. Their norm
        and residual are those of `exact`, which `merged` stands for."""
        if not merged.any():
            found = Factors.zero((merged.shape[0], merged.shape[1]), 1, torch.float64)
        else:
            found = factorise(module, merged, rank, alpha, torch.float64)
        scale = alpha / found.rank
        residual = float(torch.linalg.matrix_norm(torch.addmm(exact, found.up, found.down, alpha=-scale)))
        return replace(
            found,
            down=found.down if self.right is None else found.down @ self.right,
            up=found.up if self.left is None else self.left @ found.up,
            norm=float(torch.linalg.matrix_norm(exact)),
            residual=residual,
        )


def sizes(kind: str, into: int, out: int, ranks: Sequence[int]) -> tuple[int, int]:
    """The shape of coordinates, (a, b). ranks: of the updates that there are."""
    columns = min(into, sum(ranks)) if kind == "core" else into
    if kind == "full":
        return out, into
    return min(out, sum(ranks) if kind == "core" else sum(min(rank, into) for rank in ranks)), columns


def averaged(pairs: Sequence[Pair], scales: Sequence[float], weights: Sequence[float]) -> Pair:
    """(Σ ±√|wᵢsᵢ| Aᵢ, Σ √|wᵢsᵢ| Bᵢ), all of one rank, ± the sign of wᵢ: "linear" of peft's `add_weighted_adapter`. The
    product has cross terms BᵢAⱼ: it is not the sum of the updates. scales: sᵢ, which the pairs have in B."""
    downs = [math.copysign(math.sqrt(abs(w) * s), w) * a for (a, _), s, w in zip(pairs, scales, weights, strict=True)]
    ups = [math.sqrt(abs(w) / s) * b for (_, b), s, w in zip(pairs, scales, weights, strict=True)]
    return torch.stack(downs).sum(0), torch.stack(ups).sum(0)


def in_dtype(module: str, found: Factors, dtype: torch.dtype) -> Factors:
    """Rounded; errors as of `factorise`."""
    if not found.norm and not found.up.any():
        return replace(found, down=found.down.to(dtype), up=found.up.to(dtype))
    down, up = rounded(f"{module}.lora_A", found.down, dtype), rounded(f"{module}.lora_B", found.up, dtype)
    return replace(found, down=down, up=up)
