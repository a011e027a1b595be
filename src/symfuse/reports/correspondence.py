"""The correspondences of an alignment: which unit became which, and by what angle each head was rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.groups import Coupling, Element, Monomial, Orthogonal, Permutation, Similarity
from symfuse.groups.orthogonal import polar
from symfuse.reports.content import unit_of
from symfuse.spec import Instance, Spec, anatomy, layer_of

# The most cells of all pictures of one axis together, so that a page stays small, and per side of one picture.
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
        """The number of units of each source bin (across) that became units of each anchor bin (down); int64 [bins,
        bins]. Bin k begins with unit ceil(k n / bins); with n bins it is the permutation matrix."""
        source = self.index * bins // self.size
        anchor = torch.arange(self.size) * bins // self.size
        return torch.bincount(anchor * bins + source, minlength=bins * bins).reshape(bins, bins)


@dataclass(frozen=True)
class Turn:
    """One map of a head or another space. degrees: the mean absolute angle of the eigenvalues of its rotation (polar
    factor), 0 (the identity) to 180. scale, condition: the geometric mean of its singular values, and the ratio of the
    largest to the smallest, which is 1 for rotations. noun: the space. layer: -1 if it is in none. at: its number
    there, or numbers; empty if it is the only one."""

    axis: str
    noun: str
    layer: int
    at: str
    degrees: float
    scale: float
    condition: float = 1.0

    @property
    def is_similarity(self) -> bool:
        """Whether the map stretches all directions alike, up to rounding."""
        return self.condition < 1 + 1e-4


@dataclass(frozen=True)
class Correspondence:
    """The maps of one alignment by axis: all instances of every axis with an element (the identity where an instance
    has none). reorderings: axes whose elements are all permutations, perhaps with scales. turns: all others, except
    transported axes, whose units do not correspond one to one. variants: those that make it inexact."""

    source: str
    anchor: str
    reorderings: Mapping[str, tuple[Reordering, ...]]
    turns: Mapping[str, tuple[Turn, ...]]
    variants: tuple[str, ...] = ()


def correspondence(alignment: Alignment, name: str = "") -> Correspondence:
    """name: of the models, if the provenance of the alignment has none."""
    spec = alignment.spec
    reorderings: dict[str, list[Reordering]] = {}
    turns: dict[str, list[Turn]] = {}
    moved = {i.axis for i, element in alignment.elements.items() if not isinstance(element, Coupling)}
    turned = {i.axis for i, element in alignment.elements.items() if not isinstance(element, Monomial)}
    for instance in sorted(i for i in spec.movable if i.axis in moved):
        size, batch = spec.axes[instance.axis].size, spec.batch(instance.axis)
        element = alignment.elements.get(instance)
        if instance.axis in turned:
            turn = element or Orthogonal().identity(size, batch)
            turns.setdefault(instance.axis, []).extend(_turns(spec, instance, turn))
        else:
            order = element or Permutation().identity(size, batch)
            assert isinstance(order, Monomial)
            reorderings.setdefault(instance.axis, []).extend(_reorderings(spec, instance, order))
    names = [_name(alignment, role, name) for role in ("source", "anchor")]
    return Correspondence(
        names[0],
        names[1],
        {axis: tuple(result) for axis, result in reorderings.items()},
        {axis: tuple(result) for axis, result in turns.items()},
        alignment.variants,
    )


def angles(matrix: Tensor) -> Tensor:
    """The mean |arg λ| over the eigenvalues λ of orthogonal matrices [*b, n, n], in degrees, float64 [*b].

    It is 0 only for the identity, and independent of the basis.
    """
    result: Tensor = torch.linalg.eigvals(matrix.double()).angle().abs().mean(-1).rad2deg()
    return result


def bins(reorderings: tuple[Reordering, ...]) -> int:
    """The number of bins per side of these pictures: at most one per unit."""
    fit = int((_CELLS / len(reorderings)) ** 0.5)
    return max(1, min(_SIDE, fit, *(one.size for one in reorderings)))


def _reorderings(spec: Spec, instance: Instance, element: Monomial) -> list[Reordering]:
    layer = _layer(spec, instance)
    result = []
    for position in product(*map(range, element.batch)):
        words = [] if layer == -1 else [f"layer {layer}"]
        words += [f"{axis} {i}" for axis, i in zip(spec.batch_axes(instance.axis), position, strict=True)]
        result.append(Reordering(instance.axis, ", ".join(words) or "whole model", element.index[position]))
    return result


def _turns(spec: Spec, instance: Instance, element: Element) -> list[Turn]:
    if isinstance(element, Similarity):
        rotation, scale = element.matrix, torch.ones(element.batch) if element.scale is None else element.scale
    else:
        matrix = element.to_dense()
        rotation, scale = polar(matrix), torch.linalg.slogdet(matrix).logabsdet.div(element.size).exp()
    values = torch.stack([angles(rotation), scale.double(), element.condition().double()], -1)
    layer, within = _layer(spec, instance), (*spec.batch_axes(instance.axis), instance.axis)
    noun = "stream" if anatomy(instance.axis) == "residual" else unit_of(within[0])
    return [
        Turn(instance.axis, noun, layer, ".".join(map(str, at)), *values[at].tolist())
        for at in product(*map(range, element.batch))
    ]


def _layer(spec: Spec, instance: Instance) -> int:
    """The layer of an instance; -1 if it is in none."""
    layer = layer_of(spec.index_of(instance))
    return -1 if layer is None else layer


def _name(alignment: Alignment, role: str, otherwise: str) -> str:
    model = alignment.provenance.get(role)
    return str(model["name"]) if isinstance(model, dict) and "name" in model else f"{otherwise} {role}".strip()
