"""Matching as the papers publish it: one layer, one head, one dense matrix at a time, without symfuse.

For BERT and RoBERTa state dicts (names without prefix). Sources: Zhang et al. 2025, Theorem 4.1, Algorithm 1
and Eq. 11–12 for attention; Git Re-Basin (Ainsworth et al. 2023), Eq. 3 for feed-forward blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

State = Mapping[str, Tensor]
SELF = "encoder.layer.{}.attention.self."
OUTPUT = "encoder.layer.{}.attention.output.dense."
FFN_IN, FFN_OUT = "encoder.layer.{}.intermediate.dense.", "encoder.layer.{}.output.dense."


@dataclass(frozen=True)
class Head:
    """One head's map a·R of queries (keys: R/a) or of values (outputs: R/a)."""

    rotation: Tensor
    scale: float


def with_bias(state: State, name: str) -> Tensor:
    """A projection with its bias as one more column."""
    return torch.cat([state[name + "weight"], state[name + "bias"][:, None]], dim=1)


def rotation(anchor: list[Tensor], source: list[Tensor]) -> Tensor:
    """argmax over orthogonal R of Σ ⟨anchor, R source⟩: U Vᵀ of Σ anchor sourceᵀ."""
    gram = torch.zeros(len(anchor[0]), len(anchor[0]), dtype=torch.float64)
    for b, a in zip(anchor, source, strict=True):
        gram += b @ a.T
    u, _, vt = torch.linalg.svd(gram)
    return u @ vt


def scale(anchor: list[Tensor], source: list[Tensor]) -> float:
    """The positive root of |x₁|²a⁴ − ⟨x₁,x₂⟩a³ + ⟨y₁,y₂⟩a − |y₁|² with the least objective, that of `distance`."""
    (x1, y1), (x2, y2) = source, anchor
    p, q = float((x1 * x1).sum()), float((x1 * x2).sum())
    r, s = float((y1 * y1).sum()), float((y1 * y2).sum())
    roots = [float(z.real) for z in np.roots([p, -q, 0.0, s, -r]) if abs(z.imag) < 1e-9 and z.real > 0]
    return min(roots, key=lambda a: p * a**2 - 2 * a * q + r / a**2 - 2 * s / a)


def match_head(anchor: list[Tensor], source: list[Tensor]) -> Head:
    """The rotation, then once the scale."""
    r = rotation(anchor, source)
    return Head(r, scale(anchor, [r @ t for t in source]))


def distance(head: Head, anchor: list[Tensor], source: list[Tensor]) -> float:
    """|x₂ − a R x₁|² + |y₂ − R y₁ / a|²."""
    moved = (head.scale * (head.rotation @ source[0]), head.rotation @ source[1] / head.scale)
    return sum(float(((b - m) ** 2).sum()) for b, m in zip(anchor, moved, strict=True))


def match_head_in_turns(anchor: list[Tensor], source: list[Tensor]) -> Head:
    """Rotation and scale in turns, an SVD each, until nothing changes."""
    a = 1.0
    for _ in range(1000):
        r = rotation([a * anchor[0], anchor[1] / a], source)
        before, a = a, scale(anchor, [r @ t for t in source])
        if abs(a - before) < 1e-12:
            break
    return Head(r, a)


def match_attention(source: State, anchor: State, layer: int, heads: int) -> tuple[list[Head], list[Head]]:
    """The maps of all heads of a layer: of queries and keys, and of values and outputs."""
    qk, vo = [], []
    size = len(anchor[SELF.format(layer) + "query.bias"]) // heads
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        pairs = []
        for state in (anchor, source):
            q, k, v = (
                with_bias(state, SELF.format(layer) + part)[rows].double() for part in ("query.", "key.", "value.")
            )
            o = state[OUTPUT.format(layer) + "weight"][:, rows].T.double()
            pairs.append(([q, k], [v, o]))
        (qk_anchor, vo_anchor), (qk_source, vo_source) = pairs
        qk.append(match_head(qk_anchor, qk_source))
        vo.append(match_head(vo_anchor, vo_source))
    return qk, vo


def match_ffn(source: State, anchor: State, layer: int) -> Tensor:
    """The dense 0/1 matrix P that maximises ⟨P, Σ anchor sourceᵀ⟩ over the neurons of a layer."""
    w1, w2 = FFN_IN.format(layer), FFN_OUT.format(layer)
    gram = with_bias(anchor, w1) @ with_bias(source, w1).T + anchor[w2 + "weight"].T @ source[w2 + "weight"]
    rows, columns = linear_sum_assignment(gram.numpy(), maximize=True)
    permutation = torch.zeros_like(gram)
    permutation[rows, columns] = 1
    return permutation


def apply_attention(state: State, layer: int, qk: list[Head], vo: list[Head]) -> dict[str, Tensor]:
    """The tensors of a layer's attention, moved head by head in float64."""
    names = [SELF.format(layer) + part for part in ("query.", "key.", "value.")]
    output = OUTPUT.format(layer) + "weight"
    out = {name: state[name].clone() for n in names for name in (n + "weight", n + "bias")}
    out[output] = state[output].clone()
    for head, (x, y) in enumerate(zip(qk, vo, strict=True)):
        size = len(x.rotation)
        rows = slice(head * size, (head + 1) * size)
        for name, g, a in zip(names, (x, x, y), (x.scale, 1 / x.scale, y.scale), strict=True):
            for part in ("weight", "bias"):
                moved = a * (g.rotation @ state[name + part][rows].double())
                out[name + part][rows] = moved.to(state[name + part].dtype)
        moved = state[output][:, rows].double() @ y.rotation.T / y.scale
        out[output][:, rows] = moved.to(state[output].dtype)
    return out


def apply_ffn(state: State, layer: int, permutation: Tensor) -> dict[str, Tensor]:
    """The tensors of a layer's feed-forward block, moved by the product with the dense matrix."""
    w1, w2 = FFN_IN.format(layer), FFN_OUT.format(layer)
    return {
        w1 + "weight": permutation @ state[w1 + "weight"],
        w1 + "bias": permutation @ state[w1 + "bias"],
        w2 + "weight": state[w2 + "weight"] @ permutation.T,
    }
