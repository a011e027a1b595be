"""Assign to each unit of the wide model the unit of the narrow one of which it is a copy: many to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.groups import Group, Permutation, Signed, SignedMonomial
from symfuse.groups.assignment import assign
from symfuse.model import Model
from symfuse.rewriting.computed import reader
from symfuse.spec import Instance, Variance, anatomy
from symfuse.widths.maps import Duplication, Widening
from symfuse.widths.resized import through
from symfuse.widths.rules import HEADS, normed
from symfuse.widths.units import Occurrence, occurrences


def assign_copies(scores: Float[Tensor, "m n"]) -> Int[Tensor, " m"]:
    """argmax over maps s from m units onto n ≤ m of Σᵢ scores[i, s(i)], exact.

    Solved as one m × m assignment: n columns are the units, each of which must be assigned once; each of the other m −
    n columns scores for a row as much as the row's best unit. SymmetryError if a score is not finite.
    """
    m, n = scores.shape
    best = scores.amax(-1, keepdim=True)
    assigned = assign(torch.cat([scores, best.expand(m, m - n)], -1))
    return torch.where(assigned < n, assigned, scores.argmax(-1))


@dataclass(frozen=True)
class Pair:
    """A narrow model, the maps by which it is widened, and its alignment with the wide one."""

    narrow: Model
    wide: Model
    maps: Mapping[Instance, Widening]
    alignment: Alignment


def match_copies(pair: Pair, *, even: bool = True) -> dict[Instance, Duplication]:
    """The copies that bring the narrow model nearest to the wide one, for each axis whose units may have any number of
    copies (neurons, heads), everything else being widened and aligned already. Shares are equal; if not `even`, those
    of neurons are fitted by least squares.

    A pair scores −½ |x_i − y_j|², over all weights of a unit; weights that read a copy count with the mean share, n /
    m. Scales and signs that a neuron leaves free are normalised first; of heads the best norm-preserving map inside of
    each pair is used.
    """
    spec = pair.narrow.spec
    out = {}
    for instance, widening in pair.maps.items():
        if not isinstance(widening, Duplication) or normed(spec, instance.axis) or spec.is_shared(instance.axis):
            continue
        if anatomy(instance.axis) == "q" and spec.batch_axes(instance.axis):  # beside keys, whose order is not known
            continue
        sides = _Sides(pair, instance)
        scores = sides.heads() if anatomy(instance.axis) in HEADS else sides.neurons()
        flat = scores.reshape(-1, *scores.shape[-2:])
        index = torch.stack([assign_copies(one) for one in flat]).reshape(*scores.shape[:-1])
        copies = Duplication.of(index, widening.size)
        out[instance] = copies if even or anatomy(instance.axis) in HEADS else sides.least_squares(copies)
    return out


class _Sides:
    """The weights of the units of one axis: of the wide model, and of the narrow one after widening and aligning every
    other axis. x: [*b, m, k]; y: [*b, n, k]."""

    def __init__(self, pair: Pair, instance: Instance) -> None:
        self.pair, self.instance = pair, instance
        spec, axis = pair.narrow.spec, instance.axis
        wide = pair.alignment.spec
        self.mixed = replace(wide, axes={**wide.axes, axis: spec.axes[axis]})
        inside = {name for name, one in wide.axes.items() if axis in one.per} | {axis}
        maps = {i: widening for i, widening in pair.maps.items() if i.axis != axis}
        elements = {i: g for i, g in pair.alignment.elements.items() if i.axis not in inside}
        moving = replace(pair.alignment, spec=self.mixed, elements=elements, shifts={})
        there, here = reader(pair.wide), reader(pair.narrow)
        self.tensors = {
            name: (there(name), moving.move(name, through(spec, self.mixed, maps, name, here(name))))
            for name in spec.movable[instance]
            if name in pair.wide.spec.tensors
        }
        self.share = spec.axes[axis].size / wide.axes[axis].size

    @property
    def group(self) -> Group:
        group = self.pair.narrow.spec.axes[self.instance.axis].group
        assert group is not None
        return group

    def pairs(self) -> Iterator[tuple[Occurrence, Occurrence]]:
        """All occurrences of the axis, in both models."""
        axis = self.instance.axis
        for name, (x, y) in self.tensors.items():
            sides = (occurrences(spec, axis, name, t) for spec, t in ((self.pair.wide.spec, x), (self.mixed, y)))
            yield from zip(*sides, strict=True)

    def neurons(self) -> Float[Tensor, "*b m n"]:
        kinds = self.by_kind()
        if not isinstance(self.group, Permutation | Signed):
            kinds = _balanced(kinds)
        free = [
            _worth(x, y, self.share if kind is Variance.DUAL else 1.0)
            for kind, (x, y) in kinds.items()
            if kind is not Variance.PLAIN
        ]
        total = sum((inner for inner, _ in free), torch.zeros(()))
        if isinstance(self.group, Signed | SignedMonomial):
            total = total.abs()
        total = total - sum(norm for _, norm in free)
        if Variance.PLAIN in kinds:
            inner, norm = _worth(*kinds[Variance.PLAIN], 1.0)
            total = total + inner - norm
        return total

    def by_kind(self) -> dict[Variance, tuple[Tensor, Tensor]]:
        """Both sides of all weights that write, read (DUAL), or are only reordered, side by side."""
        batch = self.mixed.batch_axes(self.instance.axis)
        rows_by_kind: dict[Variance, list[tuple[Tensor, Tensor]]] = {}
        for x, y in self.pairs():
            rows_by_kind.setdefault(x.atoms[x.at].variance, []).append((x.of_units(batch), y.of_units(batch)))
        return {
            kind: (torch.cat([x for x, _ in rows], -1), torch.cat([y for _, y in rows], -1))
            for kind, rows in rows_by_kind.items()
        }

    def heads(self) -> Float[Tensor, "m n"]:
        axis, spec = self.instance.axis, self.mixed
        grams: dict[str, Tensor] = {}
        m, n = (one.axes[axis].size for one in (self.pair.wide.spec, spec))
        norms, total = torch.zeros(n, dtype=torch.float64), torch.zeros(m, n, dtype=torch.float64)
        for x, y in self.pairs():
            if anatomy(axis) == "kv" and any(anatomy(name) == "q" for name in x.names):
                continue  # of which query head to which is not known yet
            share = self.share if x.read else 1.0
            norms += (share * y.of_units(())).square().sum(-1) / 2
            inside = [name for name in x.names if name in spec.axes and axis in spec.axes[name].per]
            inner = [name for name in inside if spec.axes[name].group is not None]
            if not inner:
                total += share * x.of_units(()) @ y.of_units(()).mT
                continue
            between = [per for per in spec.batch_axes(inner[0]) if per != axis]
            front = [x.at, *map(x.names.index, [*between, inner[0]])]
            gram = share * x.rows(front)[:, None] @ y.rows(front)[None].mT
            grams[inner[0]] = grams[inner[0]] + gram if inner[0] in grams else gram
        for name, gram in grams.items():
            group = spec.axes[name].group
            assert group is not None
            worth = group.usual().reach(gram)
            total += worth.flatten(2).sum(-1) if worth.ndim > 2 else worth
        return total - norms

    def least_squares(self, copies: Duplication) -> Duplication:
        """The same copies, with shares w that sum to one and minimise Σᵢ |xᵢ − wᵢ y_s(i)|² over the weights that read:
        for each group bᵢ + (1 − Σ b) / count, where b are the unconstrained best shares."""
        kinds = self.by_kind()
        if Variance.DUAL not in kinds:
            return copies
        x, own = self._beside(kinds[Variance.DUAL], copies)
        if (
            not isinstance(self.group, Permutation) and Variance.PRIMAL in kinds
        ):  # in the narrow neuron's scale and sign
            scale = _ratio(*self._beside(kinds[Variance.PRIMAL], copies))
            x = x * (scale.sign() if isinstance(self.group, Signed) else scale)[..., None]
        b = _ratio(x, own)
        ones = torch.ones_like(b)
        zeros = b.new_zeros(*b.shape[:-1], copies.size)
        sums, counts = (zeros.scatter_add(-1, copies.index, t) for t in (b, ones))
        return replace(copies, share=b + ((1 - sums) / counts).gather(-1, copies.index))

    @staticmethod
    def _beside(sides: tuple[Tensor, Tensor], copies: Duplication) -> tuple[Tensor, Tensor]:
        """Each unit of the wide model, and the unit of the narrow one of which it is a copy."""
        x, y = sides
        return x, torch.take_along_dim(y, copies.index[..., None], -2)


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """argmin over a of |x − a y|², row by row; 0 where y is zero."""
    squares = y.square().sum(-1)
    return torch.where(squares > 0, (x * y).sum(-1) / torch.where(squares > 0, squares, 1.0), 0.0)


def _worth(x: Tensor, y: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """⟨x_i, s y_j⟩, and ½ |s y_j|² in a row."""
    return share * x @ y.mT, (share * y).square().sum(-1)[..., None, :] / 2


def _balanced(kinds: Mapping[Variance, tuple[Tensor, Tensor]]) -> dict[Variance, tuple[Tensor, Tensor]]:
    """Rescale the units of both sides so that the weights that write a unit and those that read it have the same
    norm."""
    out = dict(kinds)
    if not {Variance.PRIMAL, Variance.DUAL} <= out.keys():
        return out
    for side in (0, 1):
        written, read = (kinds[kind][side].norm(dim=-1, keepdim=True) for kind in (Variance.PRIMAL, Variance.DUAL))
        scale = torch.where((written > 0) & (read > 0), (read / torch.where(written > 0, written, 1.0)).sqrt(), 1.0)
        for kind, factor in ((Variance.PRIMAL, scale), (Variance.DUAL, 1 / scale)):
            pair = list(out[kind])
            pair[side] = pair[side] * factor
            out[kind] = (pair[0], pair[1])
    return out
