"""Which head of the source belongs to which head of the anchor: each pair is scored at its best inner elements, and the
heads are assigned (Ainsworth et al. 2023 have no such step; Verma & Elbayad 2024, Section 3.2, from activations)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.groups import Element, Group
from symfuse.groups.assignment import assign_batch
from symfuse.groups.monomial import Monomial, Permutation
from symfuse.spec import Atom, Instance, Spec
from symfuse.stats import Read, features
from symfuse.stats.weights import require_products


def match_outer(
    spec: Spec,
    outer: Instance,
    inner: Sequence[Instance],
    anchor: Read,
    source: Mapping[str, Tensor],
    groups: Mapping[Instance, Group],
    skip: Collection[tuple[str, str]],
) -> Element:
    """The permutation of an axis (heads) that has the largest sum of scores of its pairs. The score of anchor index i
    and source index j is, summed over the inner axes, the largest ⟨g, C_ij⟩ that their groups reach, or ⟨1, C_ij⟩ of
    those that are not matched, and ⟨x_i, y_j⟩ of what has no inner axis.

    inner: the instances to be matched inside. Of their norms the sum is the same for every permutation. Where one of
    them is reordered itself (the query heads that share a key), pairs are scored by what is not of it: keys and values.
    """
    size = spec.axes[outer.axis].size
    total = torch.zeros(size, size, dtype=torch.float64)
    insides = [axis for axis in spec.order if outer.axis in spec.batch_axes(axis)]
    matched = {instance.axis: instance for instance in inner}
    keys = [per for per in spec.axes[outer.axis].per if per in spec.index_axes]
    index = dict(zip(keys, outer.index, strict=True))
    names = [name for name in spec.movable[outer] if name in source]
    beside = [{atom.name for atom in part} for name in names for part in spec.tensors[name].layout.parts()]
    permuted = {axis for axis in matched if isinstance(groups[matched[axis]], Permutation)}
    reordered = {axis for axis in permuted if any(axis in part and part & {*insides} - {axis} for part in beside)}
    insides = [axis for axis in insides if axis not in reordered]
    read = source.__getitem__

    def checked(gram: Tensor, name: str) -> Tensor:
        require_products(outer, [gram], [name], anchor, read)
        return gram.double()

    for axis in insides:
        grams = [
            checked(_pairs(x, y), name)
            for name in names
            if axis in (atom.name for atom in spec.tensors[name].layout.atoms())
            for atoms, atom, (x, y) in _features(spec, spec.instance(axis, index), name, anchor(name), source[name])
            if (name, str(atom)) not in skip and not reordered & atoms
        ]
        if not grams:
            continue
        gram = torch.stack(grams).sum(0)
        own = torch.diagonal(gram, dim1=-2, dim2=-1).sum(-1)
        worth = groups[matched[axis]].reach(gram) if axis in matched else own
        total += worth.flatten(2).sum(-1) if worth.ndim > 2 else worth
    for name in names:
        for atoms, atom, (x, y) in _features(spec, outer, name, anchor(name), source[name]):
            if (name, str(atom)) not in skip and not atoms & {*insides, *reordered}:
                total += checked(x.double() @ y.double().T, name)
    return Monomial(assign_batch(total))


def _features(
    spec: Spec, instance: Instance, name: str, *tensors: Tensor
) -> Iterator[tuple[set[str], Atom, tuple[Tensor, ...]]]:
    """As `features`, with the axes of each part."""
    parts = [p for p in spec.tensors[name].layout.parts() if any(atom.name == instance.axis for atom in p)]
    for part, (atom, found) in zip(parts, features(spec, instance, name, *tensors), strict=True):
        yield {atom.name for atom in part}, atom, found


def _pairs(x: Float[Tensor, "h *rest n k"], y: Float[Tensor, "h *rest n k"]) -> Float[Tensor, "h h *rest n n"]:
    """The cross-Gram of every pair (i of the anchor, j of the source), in the dtype of the features. rest: what an axis
    inside is `per` besides, such as the frequencies of rotary planes."""
    return x[:, None] @ y[None].mT.to(x.dtype)
