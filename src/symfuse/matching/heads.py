"""Assign the source's heads (or experts) to the anchor's. Each pair is scored at its best inner elements (Verma &
Elbayad 2024, Section 3.2, from activations; Ainsworth et al. 2023 have no such step)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.groups import Element, Group
from symfuse.groups.assignment import assign_batch
from symfuse.groups.monomial import Monomial, Permutation
from symfuse.spec import Atom, Instance, Spec, Variance
from symfuse.stats import Read, features
from symfuse.stats.weights import require_products

# Entries of the cross-Gram matrices that are computed at once: enough for all pairs of heads, or a few of experts.
ENTRIES = 1 << 24

Scored = tuple[str, Atom, Tensor, Tensor]  # the tensor, the variance, and the anchor's and the source's features


def match_outer(
    spec: Spec,
    outer: Instance,
    inner: Sequence[Instance],
    anchor: Read,
    source: Mapping[str, Tensor],
    groups: Mapping[Instance, Group],
    skip: Collection[tuple[str, str]],
) -> Element:
    """The permutation of an outer axis (heads, experts) with the largest total score.

    The score of index i of the anchor and j of the source is the sum of the largest ⟨g, C_ij⟩ over the group of each
    inner axis that is matched, and of ⟨x_i, y_j⟩ over the parts without an inner axis (norms are the same for every
    permutation). If the axis is itself inside of another (heads in blocks), there is one permutation for each index of
    that.

    inner: the instances to be matched inside. If one of them is reordered too (the query heads that share a key), pairs
    are scored by the parts without it (keys and values), and by those with no other inner axis (of a group of experts,
    the rows of their router). If there are no such parts, they are scored at its best order (heads in blocks).
    """
    size, batch = spec.axes[outer.axis].size, spec.batch(outer.axis)
    total = next(iter(source.values())).new_zeros(math.prod(batch), size, size, dtype=torch.float64)
    insides = [axis for axis in spec.order if outer.axis in spec.batch_axes(axis)]
    matched: dict[str, list[Instance]] = {}  # several for heads that all layers share
    for instance in inner:
        matched.setdefault(instance.axis, []).append(instance)
    names = [name for name in spec.movable[outer] if name in source]
    reordered = reordered_inside(spec, outer, names, {i: groups[i] for i in inner})
    beside = {axis: {*insides} - {axis} if axis in reordered else reordered for axis in insides}
    insides = [axis for axis in insides if axis in matched]
    read = source.__getitem__

    def checked(gram: Tensor, name: str) -> Tensor:
        require_products(outer, [gram], gram.dtype, [name], anchor, read)
        return gram.double()

    def scores(units: Sequence[str], beside: Mapping[str, AbstractSet[str]]) -> Tensor | None:
        """[batch, units, units], summed over the inner axes; parts that have axes of `beside` are left out. None if no
        part is left."""
        out = None
        for instance in (one for axis in insides for one in matched[axis]):
            axes, front = spec.batch_axes(instance.axis), (*spec.batch_axes(outer.axis), *units)
            if not {*units} <= {*axes}:
                continue
            parts = [
                (name, at.atom, _flat(x, axes, front, len(total)), _flat(y, axes, front, len(total)))
                for name in names
                if name in spec.movable[instance]
                for at, (x, y) in features(spec, instance, name, anchor(name), source[name])
                if (name, str(at.atom)) not in skip and beside[instance.axis].isdisjoint(one.name for one in at.atoms)
            ]
            if parts:
                each = range(len(total))
                worth = [_worth(groups[instance], [(n, a, x[i], y[i]) for n, a, x, y in parts], checked) for i in each]
                out = torch.stack(worth) if out is None else out + torch.stack(worth)
        return out

    if (found := scores([outer.axis], beside)) is not None:
        total += found
    elif len(reordered) == 1:  # all parts have it: score each pair at its best order inside (heads in blocks)
        within = scores([outer.axis, *reordered], dict.fromkeys(insides, frozenset()))
        total += 0 if within is None else _best_inside(within, size)
    for name in names:
        solved = {one.axis for one in inner if name in spec.movable[one]}
        for at, (x, y) in features(spec, outer, name, anchor(name), source[name]):
            if all((name, str(one)) not in skip and one.name not in solved for one in at.atoms):
                x, y = (one.double().reshape(len(total), size, -1) for one in (x, y))
                total += checked(x @ y.mT, name)
    return Monomial(assign_batch(total).reshape(*batch, size))


def _flat(features: Tensor, axes: Sequence[str], front: Sequence[str], batch: int) -> Tensor:
    """[batch, units, *rest, n, k] of features with these axes before n and k. front: the axes of batch and units."""
    at = [axes.index(axis) for axis in front]
    features = features.permute(*at, *(i for i in range(features.ndim) if i not in at))
    return features.reshape(batch, -1, *features.shape[len(at) :])


def _best_inside(scores: Float[Tensor, "b pairs pairs"], size: int) -> Float[Tensor, "b n n"]:
    """The score of every pair of blocks: the sum at the best order of what is inside of them."""
    inside = scores.shape[-1] // size
    blocks = scores.reshape(-1, size, inside, size, inside).transpose(2, 3)
    best = assign_batch(blocks)[..., None].to(blocks.device)
    return blocks.gather(-1, best).sum((-2, -1))


def reordered_inside(spec: Spec, outer: Instance, names: Sequence[str], inner: Mapping[Instance, Group]) -> set[str]:
    """The axes inside of an outer one that are permuted, and have a tensor part in common with another axis inside: the
    query heads that share a key, with its planes. inner: the instances matched inside, with their groups; names: of the
    tensors whose parts are looked at."""
    insides = {axis for axis in spec.order if outer.axis in spec.batch_axes(axis)}
    beside = [{atom.name for atom in part} for name in names for part in spec.tensors[name].layout.parts]
    permuted = {instance.axis for instance, group in inner.items() if isinstance(group, Permutation)}
    return {axis for axis in permuted if any(axis in part and part & insides - {axis} for part in beside)}


def _worth(group: Group, parts: Sequence[Scored], checked: Callable[[Tensor, str], Tensor]) -> Float[Tensor, "h h"]:
    """The score of every pair for one inner axis, over all parts that have it, computed for some pairs at a time."""
    size, *rest, n, _ = parts[0][2].shape
    step = max(1, math.isqrt(ENTRIES // (math.prod(rest) * n * n)))
    out = parts[0][2].new_empty(size, size, dtype=torch.float64)
    for i in range(0, size, step):
        for j in range(0, size, step):
            grams: dict[bool, Tensor] = {}  # False: of gates, which an element only permutes
            for name, atom, x, y in parts:
                feels = atom.variance is not Variance.PLAIN
                gram = checked(_pairs(x[i : i + step], y[j : j + step]), name)
                grams[feels] = grams[feels].add_(gram) if feels in grams else gram
            plain = grams.get(False)
            felt = grams[True] if plain is None else grams.get(True, torch.zeros_like(plain))
            worth = group.reach(felt, plain)
            out[i : i + step, j : j + step] = worth.flatten(2).sum(-1) if worth.ndim > 2 else worth
    return out


def _pairs(x: Float[Tensor, "h *rest n k"], y: Float[Tensor, "h *rest n k"]) -> Float[Tensor, "h h *rest n n"]:
    """The cross-Gram of every pair (i of the anchor, j of the source), in the dtype of the features. rest: the other
    axes that an inner axis is `per`, such as the frequencies of rotary planes."""
    return x[:, None] @ y[None].mT.to(x.dtype)
