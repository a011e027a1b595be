"""How far apart two models are: over all parameters, by axis, by layer and by tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from symfuse.architectures import Model, require_same_shape
from symfuse.spec import Spec


@dataclass(frozen=True)
class Distance:
    """Squared Euclidean distances, float64 accumulations. by_axis: each number belongs to the innermost axis on which
    a group acts (`qk`, `v`, `ffn`, else `residual`, else `rest`), so the parts add up to the total. by_layer: the
    same by layer, -1 for what is in none. norm_a, norm_b: squared norms; dot: the inner product."""

    total: float
    dot: float
    norm_a: float
    norm_b: float
    by_axis: Mapping[str, float]
    by_layer: Mapping[int, float]
    by_tensor: Mapping[str, float]

    @property
    def euclidean(self) -> float:
        return math.sqrt(self.total)

    @property
    def cosine(self) -> float:
        return self.dot / math.sqrt(self.norm_a * self.norm_b) if self.norm_a and self.norm_b else math.nan

    @property
    def relative(self) -> float:
        """The distance as a share of the norm of b."""
        return math.sqrt(self.total / self.norm_b) if self.norm_b else math.inf


def distance(a: Model, b: Model) -> Distance:
    """The distance over the tensors that both have (task heads of one model only are left out), tensor by tensor.

    Raises IncompatibleError if the base models are not of one family and shape.
    """
    require_same_shape([a, b])
    by_axis: dict[str, float] = defaultdict(float)
    by_layer: dict[int, float] = defaultdict(float)
    by_tensor: dict[str, float] = {}
    sums = torch.zeros(3, dtype=torch.float64)
    for name, declared in a.spec.tensors.items():
        if not common(a.spec, b.spec, name):
            continue
        x, y = a.read(name), b.read(name)
        by_tensor[name] = 0.0
        for part, other in zip(a.spec.segments(name, x), b.spec.segments(name, y), strict=True):
            left, right = part.view.double(), other.view.double()
            gap = (left - right).square().sum().item()
            sums += torch.stack([(left * right).sum(), left.square().sum(), right.square().sum()])
            by_axis[_innermost(a.spec, [atom.name for atom in part.atoms])] += gap
            by_layer[declared.index.get("l", -1)] += gap
            by_tensor[name] += gap
    dot, norm_a, norm_b = sums.tolist()
    layers = dict(sorted(by_layer.items()))
    return Distance(sum(by_tensor.values()), dot, norm_a, norm_b, dict(by_axis), layers, by_tensor)


def common(a: Spec, b: Spec, name: str) -> bool:
    """Whether a tensor is in both models, with one shape, and not merely the alias of another."""
    if name not in b.tensors or name in a.tied or name in b.tied:
        return False
    return a.tensors[name].layout.shape(a.sizes) == b.tensors[name].layout.shape(b.sizes)


def _innermost(spec: Spec, names: list[str]) -> str:
    return next((axis for axis in spec.order if axis in names), "rest")
