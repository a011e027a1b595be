"""How several models are related: all pairs, a tree, duplicates, and which is a merge of others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symfuse.matching.problem import alike_tied
from symfuse.messages import SCHEMA, shown
from symfuse.model import Model
from symfuse.relations.moving import in_place, matched
from symfuse.relations.relation import Relation
from symfuse.relations.verdict import CUT, SAME_FUNCTION, SAME_WEIGHTS, WIDTH

LEAST = 0.01  # of a weight: a part with less is none
MERGED = 0.2  # of the distance to the nearest part, that a weighted mean of parts may leave; its weights are positive


@dataclass(frozen=True)
class Merge:
    """That one model is about Σ weights · parts, by least squares over all matrices after all were moved onto it. left:
    |model − Σ| over the distance to the nearest part; 0 for an exact merge, 1 if the others say nothing more."""

    model: str
    parts: tuple[str, ...]
    weights: tuple[float, ...]
    left: float


@dataclass(frozen=True, eq=False)
class Relations:
    """The relations of several models. pairs: by (number, number), the lower one first, from 0."""

    models: tuple[Model, ...]
    pairs: Mapping[tuple[int, int], Relation]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.models)

    @cached_property
    def matrix(self) -> list[list[float]]:
        """The similarity of each pair, the median cosine of matched units; 0 of models that cannot be compared."""
        out = np.eye(len(self.models))
        for (i, j), relation in self.pairs.items():
            value = relation.verdict.similarity
            out[i, j] = out[j, i] = 0.0 if math.isnan(value) else value
        rows: list[list[float]] = out.tolist()
        return rows

    @cached_property
    def tree(self) -> str:
        """Average linkage of 1 − similarity, in Newick's format: `((a:0.01,b:0.01):0.3,c:0.31);`."""
        from scipy.cluster.hierarchy import linkage, to_tree
        from scipy.spatial.distance import squareform

        if len(self.models) < 2:
            return f"{_label(self.names[0])};"
        apart = 1 - np.clip(np.asarray(self.matrix), 0, 1)
        np.fill_diagonal(apart, 0)
        root: Any = to_tree(linkage(squareform(apart, checks=False), "average"))
        return f"{self._branch(root)};"

    def _branch(self, node: Any) -> str:
        if node.is_leaf():
            return _label(self.names[node.id])
        sides = ",".join(f"{self._branch(one)}:{node.dist - one.dist:.4g}" for one in (node.left, node.right))
        return f"({sides})"

    @cached_property
    def duplicates(self) -> list[tuple[str, ...]]:
        """Groups of models with the same weights or the same function."""
        group = [*range(len(self.models))]
        for (i, j), relation in self.pairs.items():
            if relation.kind in (SAME_WEIGHTS, SAME_FUNCTION):
                group = [group[i] if one == group[j] else one for one in group]
        members = [tuple(name for name, one in zip(self.names, group, strict=True) if one == key) for key in set(group)]
        return sorted(one for one in members if len(one) > 1)

    @cached_property
    def merges(self) -> list[Merge]:
        """The models that are weighted means of others (`MERGED`), of those that none is a duplicate of. Of parts that
        are duplicates the first is named."""
        return [merge for number in range(len(self.models)) if (merge := self._merge(number)) is not None]

    def _merge(self, number: int) -> Merge | None:
        parts, moved = list[int](), False
        for other in (n for n in range(len(self.models)) if n != number):
            verdict = self.pairs[min(number, other), max(number, other)].verdict
            if verdict.kind in (SAME_WEIGHTS, SAME_FUNCTION):
                return None
            if verdict.related and verdict.kind not in (CUT, WIDTH) and not self._again(other, parts):
                parts.append(other)
                moved |= bool(verdict.moved)
        if len(parts) < 2:
            return None
        found, weights, left = mixture(self.models[number], [self.models[part] for part in parts], moved=moved)
        names = tuple(self.names[parts[at]] for at in found)
        return Merge(self.names[number], names, weights, left) if len(found) > 1 and left <= MERGED else None

    def _again(self, number: int, parts: Sequence[int]) -> bool:
        """Whether a model is a duplicate of one of these, which come before it."""
        return any(self.pairs[part, number].kind in (SAME_WEIGHTS, SAME_FUNCTION) for part in parts)

    __repr__, _repr_html_ = shown(
        lambda self: {
            "models": len(self.models), "pairs related": sum(one.verdict.related for one in self.pairs.values()),
            "groups of duplicates": len(self.duplicates),
        }
    )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "schema": SCHEMA, "models": list(self.names), "matrix": self.matrix, "tree": self.tree,
            "duplicates": [list(one) for one in self.duplicates],
            "merges": [{"model": m.model, "parts": list(m.parts), "weights": list(m.weights), "left": m.left}
                       for m in self.merges],
            "pairs": [one.to_dict() for one in self.pairs.values()],
        }  # fmt: skip


def mixture(model: Model, parts: Sequence[Model], *, moved: bool) -> tuple[tuple[int, ...], tuple[float, ...], float]:
    """The weights of least squares of a model by others over all matrices, and what they leave, over the distance to
    the nearest of them. Parts with a weight below `LEAST` are left out, the least one first; the numbers of the others
    come before their weights, which are positive. moved: after each is moved onto the model, in its frame."""
    sides = [(matched if moved else in_place)(*alike_tied(part, model)) for part in parts]
    names = [n for n in sides[0].names if sides[0].anchor[n].ndim > 1 and all(n in side.names for side in sides)]
    gram = torch.zeros(len(parts), len(parts), dtype=torch.float64)
    cross, size = torch.zeros(len(parts), dtype=torch.float64), 0.0
    for name in names:
        rows = torch.stack([_flat(side.source[name]) for side in sides])
        target = _flat(sides[0].anchor[name])
        gram, cross, size = gram + rows @ rows.T, cross + rows @ target, size + float(target @ target)
    kept, weights = [*range(len(parts))], _solution(gram, cross)
    while len(kept) > 1 and weights.min() < LEAST:
        del kept[int(weights.argmin())]  # of a mean each part is a combination of the others too, with one below 0
        weights = _solution(gram[kept][:, kept], cross[kept])
    left = max(0.0, size - float(2 * weights @ cross[kept] - weights @ gram[kept][:, kept] @ weights))
    nearest = float((size - 2 * cross + gram.diagonal()).min().clamp_min(1e-300))
    return tuple(kept), tuple(weights.tolist()), math.sqrt(left / nearest)


def _solution(gram: Tensor, cross: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.lstsq(gram, cross[:, None], driver="gelsd").solution[:, 0]
    return solution


def _flat(tensor: Tensor) -> Tensor:
    return tensor.double().flatten()


def _label(name: str) -> str:
    """A name that Newick's format takes."""
    return "'" + name.replace("'", "''") + "'"
