"""Statistics of a model A (`symfuse.stats.statistics`) for A' = alignment(A): those that would be taken of A' on the
same data.

What a weight reads moves by the contragredient of the dimension that reads it: x' = g x, and x' = g x + s where the
alignment translates the biases of values, whose averages the output projection reads. So Σ x' x'ᵀ is

    g G gᵀ + s mᵀ + m sᵀ + n s sᵀ,    G = Σ x xᵀ, m = g Σ x, n the number of positions,

whatever g is. The Fisher information of the weights, of squares entry by entry, moves as second moments do
(`symfuse.transporting.moments`), where nothing is mixed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.errors import IncompatibleError, SymmetryError
from symfuse.io import Checkpoint, is_other
from symfuse.io.lazy import Rewritten
from symfuse.model import Model
from symfuse.spec import Atom, Axis, Declared, Layout, Shift
from symfuse.spec.layout import Node
from symfuse.stats.statistics import INDEX, Input, Statistics
from symfuse.transporting.declared import require_exact, varied, with_tensors
from symfuse.transporting.moments import CONTRAGREDIENT, Maps
from symfuse.transporting.result import Compute, Transported, computed, wide

WAY_OUT = "Collect them again, from the aligned model"


def transport_statistics(
    source: Statistics | str | os.PathLike[str],
    alignment: Alignment,
    base: Checkpoint | None = None,
    aligned: Checkpoint | None = None,
) -> Transported:
    """The folder of `transported_statistics`, for the verb. source: statistics, or their folder."""
    statistics = source if isinstance(source, Statistics) else Statistics.load(source)
    result = transported_statistics(statistics, alignment, base, aligned)
    assert isinstance(result.tensors, Rewritten)
    details = {"statistics": result.kind, "tensors": len(result.tensors), "of": result.provenance["model"]}

    def write(path: Path, _tensors: Rewritten) -> None:
        result.write(path.parent)

    return Transported("statistics", result.tensors, INDEX, {}, (), details, result.sources, write)


def transported_statistics(
    statistics: Statistics,
    alignment: Alignment,
    base: Checkpoint | None = None,
    aligned: Checkpoint | None = None,
    *,
    known: bool = False,
) -> Statistics:
    """Statistics of A' from those of A, each tensor computed when it is read.

    base: A, where it has tensors that the alignment does not declare, such as another head. aligned: A', whose lineage
    the result records. known: the caller knows that the statistics are of A, so that this is not checked. Raises
    IncompatibleError for statistics of another model, and for transported ones whose model is not recorded;
    SymmetryError for alignments with a frame or variants, and of a Fisher information for those that rotate an axis, or
    translate biases of values.
    """
    require_exact(alignment)
    if alignment.frame:
        raise SymmetryError(
            f"this alignment rewrites the model first ({', '.join(alignment.frame)}), and what that does to statistics "
            f"depends on all of it. {WAY_OUT}"
        )
    if base is not None:
        model = Model.of(base)
        statistics.require(model)
        alignment = alignment.bound(model)
    statistics.require_shapes(alignment.spec, "this alignment" if base is None else base.name)
    compute = _of_gram(statistics, alignment) if statistics.kind == "gram" else _of_fisher(statistics, alignment)
    of = statistics.provenance.get("model") or {}
    if not known and base is None:
        _require_source(statistics, alignment)
    lineage = {"name": f"{of.get('name')} (aligned)", "sha256": None} if aligned is None else aligned.lineage()
    history = {"model": dict(of), "by": dict(alignment.provenance)}
    return replace(
        statistics,
        tensors=computed(statistics.name, statistics.infos, compute),
        provenance={**statistics.provenance, "model": lineage, "moved_from": history},
    )


def _require_source(statistics: Statistics, alignment: Alignment) -> None:
    """IncompatibleError for statistics of another model than the alignment was made for, as far as both say."""
    of, source = statistics.provenance.get("model") or {}, alignment.provenance.get("source")
    source = source if isinstance(source, Mapping) and source.get("folder") else {}
    if of.get("sha256") is None and "moved_from" in statistics.provenance:
        raise IncompatibleError(
            f"{statistics.name}: they were transported before, and the model that they belong to now is not recorded; "
            "transport the original statistics by the composed alignment, or collect them again"
        )
    if is_other(source, of):
        raise IncompatibleError(
            f"{statistics.name}: statistics of {of.get('name')!r}, but the alignment moves {source.get('name')!r}; "
            "take the statistics of that model"
        )


def _of_fisher(statistics: Statistics, alignment: Alignment) -> dict[str, Compute]:
    maps = Maps.of(alignment, WAY_OUT)

    def compute(name: str) -> Tensor:
        return maps.second.move(name, wide(statistics.name, name, statistics.read(name)))

    return {name: partial(compute, name) for name in statistics.infos}


def _of_gram(statistics: Statistics, alignment: Alignment) -> dict[str, Compute]:
    readers: dict[str, list[str]] = {}
    for name, inputs in statistics.inputs.items():
        readers.setdefault(inputs.entry, []).append(name)
    out: dict[str, Compute] = {}
    for entry, names in readers.items():
        rules = [rule for rule in alignment.spec.shifts if rule.weight in names and rule.bias in alignment.shifts]
        space = _Space(alignment, entry, statistics.inputs[entry], tuple(rules))
        out |= {f"{entry}.sum": partial(_sum, statistics, space), f"{entry}.gram": partial(_gram, statistics, space)}
    return out


def _sum(statistics: Statistics, space: _Space) -> Tensor:
    name = f"{space.entry}.sum"
    total = space.move(wide(statistics.name, name, statistics.tensors[name])[None])[0]
    return total + space.input.positions * space.constant


def _gram(statistics: Statistics, space: _Space) -> Tensor:
    name, total = f"{space.entry}.gram", f"{space.entry}.sum"
    gram = space.move(space.move(wide(statistics.name, name, statistics.tensors[name])).T)
    if space.rules:
        s, m = space.constant, space.move(wide(statistics.name, total, statistics.tensors[total])[None])[0]
        cross = torch.outer(s, m)
        gram = gram + cross + cross.T + space.input.positions * torch.outer(s, s)
    return gram


@dataclass(frozen=True)
class _Space:
    """The space of the inputs of some weights. rules: those by which the alignment adds a constant to the inputs."""

    alignment: Alignment
    entry: str
    input: Input
    rules: tuple[Shift, ...]

    @property
    def node(self) -> Node:
        """The axes of an input, with the variances by which it is transformed."""
        return varied(self.alignment.spec.tensors[self.entry].layout.dims[self.input.dim], CONTRAGREDIENT)

    def move(self, vectors: Tensor) -> Tensor:
        """g of each row."""
        declared = Declared(Layout((Atom("rows"), self.node)), self.alignment.spec.tensors[self.entry].index)
        return with_tensors(self.alignment, {"rows": declared}, {"rows": Axis(len(vectors))}).move("rows", vectors)

    @property
    def constant(self) -> Tensor:
        """s: the translation of values, the same for all query heads that share them."""
        spec = self.alignment.spec
        (size,) = Layout((self.node,)).shape(spec.sizes)
        s = torch.zeros(size, dtype=torch.float64)
        for rule in self.rules:
            t = spec.part(rule.bias, self.alignment.shifts[rule.bias].double(), rule.axis)
            sizes: Mapping[str, Any] = dict(zip((atom.name for atom in t.atoms), t.view.shape, strict=True))
            for segment in Layout((self.node,)).segments(s, spec.sizes):
                names = [atom.name for atom in segment.atoms]
                if sizes.keys() <= set(names):
                    order = sorted(range(t.view.ndim), key=lambda i: names.index(t.atoms[i].name))
                    segment.view.add_(t.view.permute(order).reshape([sizes.get(name, 1) for name in names]))
        return s
