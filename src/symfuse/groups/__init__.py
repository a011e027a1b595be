"""The groups that act on axes. A new one is a file with `random`, `identity`, `contains`, `best`, and a line here."""

from __future__ import annotations

from symfuse.groups.base import Action, Element, Group, Moments, Part, PartMoments, add, objective, shapes_of
from symfuse.groups.centred import Centred
from symfuse.groups.coupling import Coupling, Sinkhorn, sinkhorn
from symfuse.groups.invertible import Invertible
from symfuse.groups.linear import Linear, compose
from symfuse.groups.monomial import Monomial, Permutation, Sign, Signed
from symfuse.groups.orthogonal import Conformal, Orthogonal, Similarity, nuclear_norms
from symfuse.groups.rotary import Phase, Rotary
from symfuse.groups.scaled import PositiveMonomial, Scaling, SignedMonomial

# Every group, by the name under which alignments are saved. The contract tests run over this table.
GROUPS: dict[str, Group] = {
    group.name: group
    for group in (
        Permutation(),
        Sign(),
        Signed(),
        Scaling(),
        PositiveMonomial(),
        SignedMonomial(),
        Orthogonal(),
        Centred(),
        Conformal(),
        Invertible(),
        Phase(),
        Rotary(),
    )
}
# Every kind of element, to load alignments.
ELEMENTS: dict[str, type[Element]] = {kind.__name__.lower(): kind for kind in (Monomial, Similarity, Linear)}


# Those of no group, which alignments have under the variant "transport".
INEXACT_ELEMENTS: dict[str, type[Element]] = {"coupling": Coupling}


def subgroups(group: Group, n: int | None = None) -> dict[str, Group]:
    """A group and its subgroups, by name, itself first; of an axis of n units those that act on as many."""
    by_name = {group.name: group}
    for name in group.below:
        by_name |= {key: one for key, one in subgroups(GROUPS[name]).items() if key not in by_name}
    return {name: one for name, one in by_name.items() if n is None or one.size in (None, n)}


__all__ = [
    "ELEMENTS", "GROUPS", "INEXACT_ELEMENTS", "Action", "Centred", "Conformal", "Coupling", "Element", "Group",
    "Invertible", "Linear", "Moments", "Monomial", "Orthogonal", "Part", "PartMoments", "Permutation", "Phase",
    "PositiveMonomial", "Rotary", "Scaling", "Sign", "Signed", "SignedMonomial", "Similarity", "Sinkhorn", "add",
    "compose", "nuclear_norms", "objective", "shapes_of", "sinkhorn", "subgroups",
]  # fmt: skip
