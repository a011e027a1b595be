"""The groups that act on axes. A new one is a file with `random`, `identity`, `contains`, `best`, and a line here."""

from __future__ import annotations

from symfuse.groups.base import Element, Group, Moments, Part, PartMoments, add, objective
from symfuse.groups.monomial import Monomial, Permutation, PositiveMonomial, Scaling, Signed
from symfuse.groups.orthogonal import Conformal, Orthogonal, Similarity

# Every group, by the name under which alignments are saved. The contract tests run over this table.
GROUPS: dict[str, Group] = {
    group.name: group for group in (Permutation(), Signed(), Scaling(), PositiveMonomial(), Orthogonal(), Conformal())
}
# Every kind of element, to load alignments.
ELEMENTS: dict[str, type[Element]] = {kind.__name__.lower(): kind for kind in (Monomial, Similarity)}

__all__ = [
    "ELEMENTS",
    "GROUPS",
    "Conformal",
    "Element",
    "Group",
    "Moments",
    "Monomial",
    "Orthogonal",
    "Part",
    "PartMoments",
    "Permutation",
    "PositiveMonomial",
    "Scaling",
    "Signed",
    "Similarity",
    "add",
    "objective",
]
