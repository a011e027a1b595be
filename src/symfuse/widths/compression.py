"""Compress a model to the shape of a narrower one: exact for a model that `expand` made, inexact for any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symfuse.groups import Centred, Invertible, Orthogonal
from symfuse.messages import some
from symfuse.model import Model, require_floating
from symfuse.rewriting import balance
from symfuse.rewriting.computed import Read, reader
from symfuse.spec import Instance, Spec, Variance
from symfuse.widths.maps import Duplication, Isometry, Widening, centred_basis, keeping_mean
from symfuse.widths.resized import resized, through
from symfuse.widths.rules import Maps, factors, normed, widenings
from symfuse.widths.shape import Shape, shape_of
from symfuse.widths.units import occurrences


def compress(model: Model, like: Model) -> Model:
    """The model in the shape of a narrower one of its family and depth. INEXACT, but for a model that `expand` made.

    Which units are merged, or left out, is decided by the weights alone. Neurons and heads that are written by similar
    weights are merged (Ward's clusters): of what writes them the mean, weighted by how much is read of each; of what
    reads them the sum. Inside of heads the largest singular values of what queries and keys, values and outputs make
    together are kept. A stream that may be rotated (`canonical(model, rotatable(model.spec))`) keeps the principal
    components of all that is written to it; any other, an integer multiple as wide, is merged in groups of equal size,
    greedily. A note says which share of the squared norm of the weights is lost: of a note of 0 the function is the
    same, of others only an evaluation can say what it is worth. A model that has the shape already comes back as it
    is. Raises IncompatibleError as `expand` does.
    """
    shape = shape_of(model, like)
    require_floating(shape.model)
    if any(isinstance(shape.model.spec.axes[axis].group, Invertible) for axis in shape.changed):
        shape = replace(shape, model=balance(shape.model))
    small, large = shape.spec, shape.model.spec
    read = reader(shape.model)
    defaults = widenings(shape, small, large)
    if not defaults:
        return shape.model
    maps = {i: _fitted(large, small, i, default, read) for i, default in defaults.items()}
    compressed = resized(shape, maps, factors(shape), back=True, name="compressed, inexact")
    sizes = [f"{small.axes[axis].size} of {large.axes[axis].size} ({axis})" for axis in shape.changed]
    note = (
        f"{model.name}: compressed to {some(sizes)}, which is inexact: {_lost(shape, maps, read):.2%} of the squared "
        "norm of the weights is lost"
    )
    return replace(compressed, notes=(*model.notes, note))


def _fitted(large: Spec, small: Spec, instance: Instance, default: Widening, read: Read) -> Widening:
    """The map of that kind whose inverse loses about the least of the weights."""
    group, n = large.axes[instance.axis].group, small.axes[instance.axis].size
    if isinstance(group, Centred | Orthogonal):
        isometry = Isometry.stream(_as_isometry(default)) if isinstance(default, Duplication) else default
        assert isinstance(isometry, Isometry)
        rows, _ = _written(large, instance, read, ())
        return replace(isometry, matrix=_principal(rows, isometry.matrix, centred=isinstance(group, Centred)))
    if isinstance(default, Isometry):
        return default
    batch = large.batch_axes(instance.axis)
    rows, sizes = _written(large, instance, read, batch)
    even = bool(normed(large, instance.axis))
    flat = [(_equal_groups if even else _clusters)(one, n) for one in rows.reshape(-1, *rows.shape[-2:])]
    index = torch.stack(flat).reshape(rows.shape[:-1])
    return Duplication.of(index, n) if even else Duplication(n, index, _shares(sizes, index, n))


def _written(spec: Spec, instance: Instance, read: Read, batch: Sequence[str]) -> tuple[Tensor, Tensor]:
    """All weights that write the units of an axis, [*b, m, k]; and the norm of the weights that read each unit, [*b,
    m]."""
    written, squares = [], torch.zeros(())
    for name in spec.movable[instance]:
        for one in occurrences(spec, instance.axis, name, read(name)):
            rows = one.of_units(batch)
            if one.read:
                squares = squares + rows.square().sum(-1)
            elif len(one.atoms) > 1 or one.atoms[0].variance is not Variance.PLAIN:  # not the gain of a norm
                written.append(rows)
    rows = torch.cat(written, -1)
    return rows, squares.sqrt().expand(rows.shape[:-1])


def _as_isometry(copies: Duplication) -> Float[Tensor, "m n"]:
    """Equal numbers of copies, as a matrix with orthonormal columns."""
    return torch.nn.functional.one_hot(copies.index, copies.size).double() * copies.share.sqrt()[:, None]


def _principal(rows: Float[Tensor, "m k"], like: Float[Tensor, "m n"], *, centred: bool) -> Float[Tensor, "m n"]:
    """The isometry onto the n directions with the largest part of the columns' squares; of all such isometries, the one
    nearest to `like`. centred: one direction is that of the ones."""
    gram, (m, n) = rows @ rows.mT, like.shape
    if centred:
        basis = centred_basis(m)
        subspace = keeping_mean(basis @ torch.linalg.eigh(basis.mT @ gram @ basis).eigenvectors[:, m - n :])
    else:
        subspace = torch.linalg.eigh(gram).eigenvectors[:, m - n :]
    u, _, vh = torch.linalg.svd(subspace.mT @ like)
    nearest: Tensor = subspace @ (u @ vh)
    return nearest


def _clusters(rows: Float[Tensor, "m k"], n: int) -> Int[Tensor, " m"]:
    """Ward's clusters: each merge is the one that increases the sum of squares about the clusters' means least."""
    from scipy.cluster.hierarchy import cut_tree, linkage

    if len(rows) == 1:
        return torch.zeros(1, dtype=torch.long)
    return torch.as_tensor(cut_tree(linkage(rows.numpy(), "ward"), n_clusters=n)[:, 0]).long()


def _equal_groups(rows: Float[Tensor, "m k"], n: int) -> Int[Tensor, " m"]:
    """Groups of m / n units: the first unit that is in no group, with those that are nearest to it."""
    m = len(rows)
    out = torch.full((m,), -1)
    gaps = torch.cdist(rows, rows)
    for group in range(n):
        first = int((out < 0).nonzero()[0])
        free = torch.where(out < 0, gaps[first], torch.inf)
        free[first] = -1.0
        out[free.topk(m // n, largest=False).indices] = group
    return out


def _shares(sizes: Float[Tensor, "*b m"], index: Int[Tensor, "*b m"], n: int) -> Float[Tensor, "*b m"]:
    """Proportional to the norm of the weights that read each unit, within its cluster; equal where all are zero."""
    zeros = sizes.new_zeros(*sizes.shape[:-1], n)
    sums = zeros.scatter_add(-1, index, sizes).gather(-1, index)
    counts = zeros.scatter_add(-1, index, torch.ones_like(sizes)).gather(-1, index)
    return torch.where(sums > 0, sizes / torch.where(sums > 0, sums, 1.0), 1 / counts)


def _lost(shape: Shape, maps: Maps, read: Read) -> float:
    """The share of the squared norm of all weights that is lost by compressing and expanding again."""
    lost = total = 0.0
    for name in shape.model.spec.tensors:
        if shape.model.spec.file_name(name) not in shape.model.whole:
            continue
        there = read(name)
        narrow = through(shape.model.spec, shape.spec, maps, name, there, back=True)
        again = through(shape.spec, shape.model.spec, maps, name, narrow)
        lost += float((there - again).square().sum())
        total += float(there.square().sum())
    return lost / total if total else 0.0
