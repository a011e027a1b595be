"""Declarations of tensors that do not belong to the model but have its axes, so that an alignment transforms them like
those of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from symfuse.alignment import Alignment
from symfuse.errors import SymmetryError
from symfuse.spec import Atom, Axis, Declared, Layout, Spec, Variance
from symfuse.spec.layout import Node

# The way out of what translations and gauges forbid.
WITHOUT = "Make an alignment without translations and gauges (`symfuse align --no-biases`)"


def with_tensors(alignment: Alignment, tensors: Mapping[str, Declared], axes: Mapping[str, Axis]) -> Alignment:
    """The alignment with more tensors, and more axes on which it does not act, in its declaration."""
    spec = alignment.spec
    more = replace(spec, tensors={**spec.tensors, **tensors}, axes={**spec.axes, **axes})
    return replace(alignment, spec=more)


def atoms_of(nodes: Iterable[Node]) -> tuple[Atom, ...]:
    """All atoms of some dimensions."""
    return Layout(tuple(nodes)).atoms


def varied(node: Node, variances: Mapping[Variance, Variance]) -> Node:
    """A dimension with the variances of its atoms replaced."""
    if isinstance(node, Atom):
        return replace(node, variance=variances.get(node.variance, node.variance))
    return replace(node, parts=tuple(varied(part, variances) for part in node.parts))


def require_alone(spec: Spec, name: str, nodes: tuple[Node, ...]) -> None:
    """SymmetryError if what moves some dimensions of a tensor depends on the indices of its others: then it does not
    move the factors of a product apart."""
    here = {atom.name for atom in atoms_of(nodes)}
    for axis in here & set(spec.order):
        if outside := [per for per in spec.batch_axes(axis) if per not in here]:
            raise SymmetryError(
                f"{name}: axis {axis!r} moves by an element for each index of {outside[0]!r}, which is another "
                "dimension of this tensor: its change of low rank does not stay of low rank. Merge the adapter into "
                "its base and align that (base+adapter), or leave the axis out (--axes)"
            )


def require_exact(alignment: Alignment) -> None:
    """SymmetryError for an alignment under a variant, which moves a model into one that computes something else."""
    if alignment.variants:
        raise SymmetryError(
            f"this alignment is inexact ({', '.join(alignment.variants)}): the aligned model computes something else, "
            "so nothing of the first fits it exactly. Make one without variants (`symfuse align` without --inexact)"
        )
