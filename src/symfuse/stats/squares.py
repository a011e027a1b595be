"""Squares of per-example gradients, summed over examples, with no more than a block of one gradient held at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 2**18  # elements of a gradient that are formed at a time: they stay in the cache


@dataclass(frozen=True)
class Outer:
    """G_b = left_bᵀ right_b; left [B, T, m], right [B, T, n]. live [B, T]: where the product is not known to be 0."""

    left: Tensor
    right: Tensor
    live: Tensor

    @classmethod
    def of(cls, d: Tensor, x: Tensor, transposed: bool) -> Outer:
        """dᵀ x, or xᵀ d, of the gradient d of a linear map's output and its input x. d is 0 at
        positions on which the loss does not depend: padding, or all tokens but the first in the last layer."""
        live = torch.linalg.vector_norm(d, torch.inf, dim=-1) != 0
        return cls(x, d, live) if transposed else cls(d, x, live)


@dataclass(frozen=True)
class Rows:
    """G_b is 0 but in the rows `ids` of a table, [B, T], to which d [B, T, n] is added as often as a row occurs."""

    ids: Tensor
    d: Tensor


Part = Outer | Rows | Tensor  # a tensor is G_b itself for all b, [B, *shape]


def add_square(total: Tensor, parts: Sequence[Part], examples: int) -> None:
    """Add Σ_b G_b², where G_b is the sum of the parts, to a total [*shape], in whose dtype all is computed.

    The sum over the examples of a batch is computed first, so that rounding does not grow with every example.
    """
    dense = [p.reshape(len(p), *total.shape).to(total.dtype) for p in parts if isinstance(p, Tensor)]
    outer = [p for p in parts if isinstance(p, Outer)]
    rows = [p for p in parts if isinstance(p, Rows)]
    whole = torch.stack(dense).sum(0) if len(dense) > 1 else dense[0] if dense else None
    if whole is not None and not outer and not rows:
        total += whole.square_().sum(0) if len(dense) > 1 else whole.square().sum(0)
        return
    maps = _joined_maps(outer, total.dtype) if outer else None
    table = _joined_tables(rows, total.dtype) if rows else None
    if table is not None and maps is None and whole is None:
        _add_tables(total, table)
    elif maps is not None and table is None and whole is None and maps.live.sum(1).max() <= 1:
        at = maps.live.int().argmax(1)[:, None, None]
        left, right = (t.take_along_dim(at, 1).squeeze(1) for t in (maps.left, maps.right))
        total.addmm_((left * maps.live.any(1, keepdim=True)).square_().T, right.square())
    else:
        _add_blocks(total.view(len(total), -1), examples, maps, table, whole)


def _joined_maps(parts: Sequence[Outer], dtype: torch.dtype) -> Outer:
    """A sum of products is one product, of all positions."""
    if len(parts) == 1:
        return Outer(parts[0].left.to(dtype), parts[0].right.to(dtype), parts[0].live)
    sides = ([p.left for p in parts], [p.right for p in parts])
    left, right = (torch.cat([t.to(dtype) for t in side], 1) for side in sides)
    return Outer(left, right, torch.cat([p.live for p in parts], 1))


def _joined_tables(parts: Sequence[Rows], dtype: torch.dtype) -> Rows:
    return Rows(torch.cat([p.ids for p in parts], 1), torch.cat([p.d.to(dtype) for p in parts], 1))


def _add_tables(total: Tensor, table: Rows) -> None:
    """Rows that occur more than once in an example are added up before they are squared."""
    examples, width = len(table.ids), total.shape[-1]
    keys = table.ids + torch.arange(examples, device=table.ids.device)[:, None] * len(total)
    distinct, which = torch.unique(keys, return_inverse=True)
    sums = total.new_zeros(len(distinct), width).index_add_(0, which.flatten(), table.d.reshape(-1, width))
    total.index_add_(0, distinct % len(total), sums.square_())


def _add_blocks(total: Tensor, examples: int, maps: Outer | None, table: Rows | None, whole: Tensor | None) -> None:
    """Block after block of a total [m, n]: of each example that block of its gradient, squared."""
    step = max(1, BLOCK // total.shape[1])
    pairs = _live_pairs(maps) if maps is not None else []
    tables = [_summed(ids, d) for ids, d in zip(table.ids, table.d, strict=True)] if table is not None else []
    gradient, squares = total.new_empty(2, min(step, len(total)), total.shape[1])
    for start in range(0, len(total), step):
        size = min(step, len(total) - start)
        g, s = gradient[:size], squares[:size].zero_()
        for b in range(examples):
            if pairs:
                left, right = pairs[b]
                torch.mm(left[:, start : start + size].T, right, out=g)
            else:
                g.zero_()
            if tables:
                ids, d = tables[b]
                first, last = torch.searchsorted(ids, ids.new_tensor([start, start + size])).tolist()
                g[ids[first:last] - start] += d[first:last]
            if whole is not None:
                g += whole[b].view(len(total), -1)[start : start + size]
            s.addcmul_(g, g)
        total[start : start + size] += s


def _live_pairs(maps: Outer) -> list[tuple[Tensor, Tensor]]:
    """Left and right of each example, without positions that add nothing."""
    if maps.live.all():
        return [*zip(maps.left, maps.right, strict=True)]
    return [(left[live], right[live]) for left, right, live in zip(maps.left, maps.right, maps.live, strict=True)]


def _summed(ids: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of one example, in order, and what is added to each."""
    distinct, which = torch.unique(ids, return_inverse=True)
    return distinct, d.new_zeros(len(distinct), d.shape[-1]).index_add_(0, which, d)
