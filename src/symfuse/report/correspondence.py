"""What an alignment makes correspond: which unit became which, and how far each head was turned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.groups import Monomial, Similarity
from symfuse.report.content import unit_of
from symfuse.spec import Instance, Spec

# Cells that all pictures of one axis may have together, so that a page stays small, and a side of one picture.
_CELLS = 80_000
_SIDE = 128


@dataclass(frozen=True)
class Reordering:
    """Unit index[i] of the source became unit i of the anchor; index: int64 [n]. place: such as "layer 3"."""

    axis: str
    place: str
    index: Tensor

    @property
    def size(self) -> int:
        return len(self.index)

    @property
    def moved(self) -> int:
        return int((self.index != torch.arange(self.size)).sum())

    def density(self, bins: int) -> Tensor:
        """How many units of each bin of the source (across) became units of each bin of the anchor (down); int64
        [bins, bins]. Bin k holds the units from ceil(k n / bins) on; with n bins it is the permutation matrix."""
        source = self.index * bins // self.size
        anchor = torch.arange(self.size) * bins // self.size
        return torch.bincount(anchor * bins + source, minlength=bins * bins).reshape(bins, bins)


@dataclass(frozen=True)
class Turn:
    """One rotation, of a head or another space: the mean absolute angle of its eigenvalues in degrees, 0 (the identity)
    to 180; and its scale. noun: what is turned. layer: -1 if it is in none; at: its number there, or numbers; empty if
    it is the only one."""

    axis: str
    noun: str
    layer: int
    at: str
    degrees: float
    scale: float


@dataclass(frozen=True)
class Correspondence:
    """Of one alignment, by axis: every instance of an axis that has an element at all; what is absent is at rest."""

    source: str
    anchor: str
    reorderings: Mapping[str, tuple[Reordering, ...]]
    turns: Mapping[str, tuple[Turn, ...]]


def correspondence(alignment: Alignment, name: str = "") -> Correspondence:
    """name: for the models, where the provenance of the alignment has none."""
    spec = alignment.spec
    reorderings: dict[str, list[Reordering]] = {}
    turns: dict[str, list[Turn]] = {}
    kinds = {instance.axis: type(element) for instance, element in alignment.elements.items()}
    for instance in sorted(i for i in spec.movable if i.axis in kinds):
        element = alignment.elements.get(instance)
        if element is None:
            axis = spec.axes[instance.axis]
            assert axis.group is not None
            element = axis.group.usual().identity(axis.size, spec.batch(instance.axis))
        if isinstance(element, Monomial):
            reorderings.setdefault(instance.axis, []).extend(_reorderings(spec, instance, element))
        elif isinstance(element, Similarity):
            turns.setdefault(instance.axis, []).extend(_turns(spec, instance, element))
    names = [_name(alignment, role, name) for role in ("source", "anchor")]
    return Correspondence(
        names[0],
        names[1],
        {axis: tuple(found) for axis, found in reorderings.items()},
        {axis: tuple(found) for axis, found in turns.items()},
    )


def angles(matrix: Tensor) -> Tensor:
    """The mean |arg λ| over the eigenvalues λ of orthogonal matrices [*b, n, n], in degrees, float64 [*b].

    It is 0 for the identity alone, and does not depend on the basis.
    """
    found: Tensor = torch.linalg.eigvals(matrix.double()).angle().abs().mean(-1).rad2deg()
    return found


def bins(reorderings: tuple[Reordering, ...]) -> int:
    """How many bins a side the pictures of these get: at most one a unit."""
    fit = int((_CELLS / len(reorderings)) ** 0.5)
    return max(1, min(_SIDE, fit, *(one.size for one in reorderings)))


def _reorderings(spec: Spec, instance: Instance, element: Monomial) -> list[Reordering]:
    layer = _layer(spec, instance)
    found = []
    for position in product(*map(range, element.batch)):
        words = [] if layer == -1 else [f"layer {layer}"]
        words += [f"{axis} {i}" for axis, i in zip(spec.batch_axes(instance.axis), position, strict=True)]
        found.append(Reordering(instance.axis, ", ".join(words) or "whole model", element.index[position]))
    return found


def _turns(spec: Spec, instance: Instance, element: Similarity) -> list[Turn]:
    degrees = angles(element.matrix)
    scale = torch.ones(element.batch) if element.scale is None else element.scale
    layer, within = _layer(spec, instance), (*spec.batch_axes(instance.axis), instance.axis)
    noun = "stream" if instance.axis == "residual" else unit_of(within[0])
    return [
        Turn(instance.axis, noun, layer, ".".join(map(str, at)), degrees[at].item(), scale[at].item())
        for at in product(*map(range, element.batch))
    ]


def _layer(spec: Spec, instance: Instance) -> int:
    """-1 for what is in no layer."""
    keys = [per for per in spec.axes[instance.axis].per if per in spec.index_axes]
    return dict(zip(keys, instance.index, strict=True)).get("l", -1)


def _name(alignment: Alignment, role: str, otherwise: str) -> str:
    model = alignment.provenance.get(role)
    return str(model["name"]) if isinstance(model, dict) and "name" in model else f"{otherwise} {role}".strip()
