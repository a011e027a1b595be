"""Merges of low-rank updates as the papers write them, without our code: whole matrices, numpy-like torch, float64.

`ties` is algorithm 1 of Yadav et al. 2023 (arXiv 2306.01708) for one tensor with equal weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor, float]  # A, B and the scale s of s·B·A
Merge = Callable[[Sequence[Tensor]], Tensor]


def ties(tasks: Sequence[Tensor], density: float) -> Tensor:
    kept = []
    for task in tasks:
        flat = task.flatten()
        order = flat.abs().argsort(descending=True)[: int(density * len(flat))]
        sparse = torch.zeros_like(flat)
        sparse[order] = flat[order]
        kept.append(sparse.reshape(task.shape))
    stack = torch.stack(kept)
    sign = torch.where(stack.sum(0) >= 0, 1.0, -1.0).double()
    agree = (stack * sign) > 0
    return (stack * agree).sum(0) / agree.sum(0).clamp(min=1)


def full(adapters: Sequence[Factors], merge: Merge) -> Tensor:
    return merge([s * b @ a for a, b, s in adapters])


def knots(adapters: Sequence[Factors], merge: Merge) -> Tensor:
    """Stoica et al. 2024 (arXiv 2410.19735), section 4: [ΔW₁ … ΔW_k] = U S [V₁ … V_k]ᵀ, merged S Vᵢᵀ."""
    updates = [s * b @ a for a, b, s in adapters]
    u, s, vt = torch.linalg.svd(torch.cat(updates, 1), full_matrices=False)
    there = s > 1e-9
    parts = (s[there, None] * vt[there]).chunk(len(updates), 1)
    return u[:, there] @ merge(parts)


def core(adapters: Sequence[Factors], merge: Merge) -> Tensor:
    """Panariello et al. 2025 (arXiv 2509.17786), section 4: Mᵢ = Uᵀ Bᵢ Aᵢ V, U and V of the stacked factors."""
    v = torch.linalg.svd(torch.cat([a for a, _, _ in adapters]), full_matrices=False).Vh
    u = torch.linalg.svd(torch.cat([s * b for _, b, s in adapters], 1), full_matrices=False).U
    return u @ merge([s * u.T @ b @ a @ v.T for a, b, s in adapters]) @ v


def factors(adapters: Sequence[Factors], weights: Sequence[float]) -> Tensor:
    """ "linear" of peft: (Σ √(wᵢsᵢ) Bᵢ)(Σ √(wᵢsᵢ) Aᵢ)."""
    roots = [(w * s) ** 0.5 for (_, _, s), w in zip(adapters, weights, strict=True)]
    a = sum(r * a for r, (a, _, _) in zip(roots, adapters, strict=True))
    b = sum(r * b for r, (_, b, _) in zip(roots, adapters, strict=True))
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return b @ a


def nearest(update: Tensor, rank: int) -> Tensor:
    """Of that rank (Eckart and Young 1936)."""
    u, s, vt = torch.linalg.svd(update, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank]
