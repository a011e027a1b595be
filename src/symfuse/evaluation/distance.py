"""The distance of two models: Euclidean distance and cosine, over all parameters or by axis, layer and tensor."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symfuse.executors import one_torch_thread
from symfuse.messages import SCHEMA, shown
from symfuse.model import Model, require_same_shape
from symfuse.spec import Spec, layer_of

BLOCK = 1 << 16  # entries that are widened at once: they stay in the cache
LARGE = 1 << 24  # on a device


@dataclass(frozen=True)
class Gap:
    """Between two vectors: squared: of their difference; dot: their inner product; norm_a, norm_b: squared norms.
    Gaps of parts add up to the gap of the whole. Summed in float64."""

    squared: float = 0.0
    dot: float = 0.0
    norm_a: float = 0.0
    norm_b: float = 0.0

    def __add__(self, other: Gap) -> Gap:
        return Gap(
            self.squared + other.squared, self.dot + other.dot, self.norm_a + other.norm_a, self.norm_b + other.norm_b
        )

    @property
    def euclidean(self) -> float:
        return math.sqrt(self.squared)

    @property
    def cosine(self) -> float:
        norms = math.sqrt(self.norm_a) * math.sqrt(self.norm_b)  # their product may be too small for a float
        return self.dot / norms if norms else math.nan

    @property
    def relative(self) -> float:
        """The distance as a share of the norm of b."""
        return math.sqrt(self.squared / self.norm_b) if self.norm_b else math.inf


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that belongs to one axis. axis: the innermost on which a group acts (`qk`, `v`, `ffn`,
    else `residual`, else `rest`); each number belongs to one. layer: -1 for tensors outside of layers."""

    tensor: str
    axis: str
    layer: int
    gap: Gap


@dataclass(frozen=True)
class Distance:
    """The distance of two models as the pieces that add up to it. after: what is left once an alignment is applied."""

    pieces: tuple[Piece, ...]
    after: Distance | None = None

    @property
    def whole(self) -> Gap:
        return sum((piece.gap for piece in self.pieces), Gap())

    @property
    def euclidean(self) -> float:
        return self.whole.euclidean

    @property
    def cosine(self) -> float:
        return self.whole.cosine

    @property
    def relative(self) -> float:
        """The distance as a share of the norm of b."""
        return self.whole.relative

    def by(self, *keys: str) -> Mapping[Hashable, Gap]:
        """Sums by "axis", "layer" or "tensor"; with several keys by their tuples. Layers rise, others stand as in the
        declaration."""
        result: dict[Hashable, Gap] = {}
        for piece in self.pieces:
            values = tuple(getattr(piece, key) for key in keys)
            key = values if len(keys) > 1 else values[0]
            result[key] = result.get(key, Gap()) + piece.gap
        return dict(sorted(result.items())) if keys == ("layer",) else result

    def shares(self, *keys: str) -> Mapping[Hashable, float]:
        """What of the whole squared distance each part of `by` is: they add up to 1, and are NaN between equal
        models (Zhang et al. 2025, Figures 3 and 4)."""
        whole = self.whole.squared
        return {key: gap.squared / whole if whole else math.nan for key, gap in self.by(*keys).items()}

    __repr__, _repr_html_ = shown(
        lambda self: {"euclidean": self.euclidean, "relative": self.relative, "cosine": self.cosine}
    )

    def to_dict(self) -> dict[str, Any]:
        """As JSON; parts by axis, layer and tensor are squared distances, which add up. No number is null. `after` is
        there if an alignment was applied."""

        def parts(key: str) -> list[dict[str, Any]]:
            shares = self.shares(key)
            return [
                {key: part, "squared": gap.squared, "of_whole": finite(shares[part]), "cosine": finite(gap.cosine)}
                for part, gap in self.by(key).items()
            ]

        whole = {name: finite(getattr(self, name)) for name in ("euclidean", "relative", "cosine")}
        after = {} if self.after is None else {"after": self.after.to_dict()}
        return {"schema": SCHEMA, **whole} | {f"by_{key}": parts(key) for key in ("axis", "layer", "tensor")} | after


def finite(number: float) -> float | None:
    """None for a number that is not finite, such as the angle to a zero vector: JSON has no NaN."""
    return number if math.isfinite(number) else None


def distance(a: Model, b: Model) -> Distance:
    """The distance over the tensors that both have (task heads of one model only are left out), tensor by tensor.

    Raises IncompatibleError if the base models are not of one family and shape.
    """
    require_same_shape([a, b])
    pieces = []
    for name, declared in a.spec.tensors.items():
        if not a.spec.shares(name, b.spec):
            continue
        x, y = a.scanned(name), b.scanned(name)
        at = layer_of(declared.index)
        layer = -1 if at is None else at
        for part, other in zip(a.spec.segments(name, x), b.spec.segments(name, y), strict=True):
            gap = _gap(*(t.view if t.view.ndim else t.view[None] for t in (part, other)))
            pieces.append(Piece(name, _innermost(a.spec, [atom.name for atom in part.atoms]), layer, gap))
    return Distance(tuple(pieces))


def _gap(x: Tensor, y: Tensor) -> Gap:
    """The gap of two tensors, some rows at a time: they are widened to float64."""
    rows = max(1, (BLOCK if x.is_cpu else LARGE) * len(x) // max(1, x.numel()))
    total = Gap()
    with one_torch_thread():  # with blocks as small as these, several threads wait for each other
        for left, right in zip(torch.split(x, rows), torch.split(y, rows), strict=True):
            left, right = left.reshape(-1).double(), right.reshape(-1).double()
            apart = left - right
            pairs = ((apart, apart), (left, right), (left, left), (right, right))
            total += Gap(*(torch.dot(u, v).item() for u, v in pairs))
    return total


def _innermost(spec: Spec, names: list[str]) -> str:
    return next((axis for axis in spec.order if axis in names), "rest")
