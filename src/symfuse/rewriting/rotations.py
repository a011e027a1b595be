"""Rotations of a model by itself, without an anchor: of residual streams, and of the values of each head. They spread
single large entries over all units, before weights are rounded (Ashkboos et al. 2024, QuaRot, arXiv 2404.00456,
Section 4: its offline rotations; Liu et al. 2024, SpinQuant, arXiv 2405.16406: R1 and R2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.errors import OptionError, SymmetryError
from symfuse.groups import Centred, Element, Group, Orthogonal, Similarity, subgroups
from symfuse.groups.monomial import random_index, random_signs
from symfuse.messages import some
from symfuse.model import Model
from symfuse.spec import Instance, Spec, anatomy

Kind = Literal["hadamard", "random"]
KINDS: tuple[Kind, ...] = ("hadamard", "random")
ATOL = 1e-6  # in each entry of QᵀQ: a matrix in float32 is orthogonal up to that


def hadamard(n: int) -> Float[Tensor, "n n"] | None:
    """H [n, n] of ±1, float64, with H Hᵀ = n and a first row of ones; None for sizes without a construction.

    The Kronecker product of Sylvester's matrix of a power of two with one of Paley's (1933), of order q + 1 for a prime
    q = 4k + 3, or 2 (q + 1) for a prime q = 4k + 1; of all that fit, that with the largest power of two.
    """
    from scipy.linalg import hadamard as sylvester

    power = n & -n
    while power:
        if (core := _paley(n // power)) is not None:
            h = np.kron(sylvester(power), core)
            return torch.from_numpy(h * h[0]).double()
        power //= 2
    return None


def _paley(n: int) -> np.ndarray | None:
    """A Hadamard matrix of order n by Paley's first or second construction; of order 1 the trivial one."""
    if n == 1:
        return np.ones((1, 1))
    if n % 4:
        return None
    if _is_prime(n - 1) and n % 4 == 0:
        s = _jacobsthal(n - 1)
        s[1:, 0] = -1
        h: np.ndarray = np.eye(n) + s
        return h
    if _is_prime(n // 2 - 1) and n % 8 == 4:
        signs, core = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
        return np.kron(_jacobsthal(n // 2 - 1), signs) + np.kron(np.eye(n // 2), core)
    return None


def _jacobsthal(q: int) -> np.ndarray:
    """χ(i − j) for i, j modulo the prime q, χ being 1 for squares and −1 for others, bordered by 0 and ones."""
    chi = -np.ones(q)
    chi[np.arange(q) ** 2 % q] = 1
    chi[0] = 0
    s = np.ones((q + 1, q + 1))
    s[0, 0] = 0
    s[1:, 1:] = chi[np.subtract.outer(np.arange(q), np.arange(q)) % q]
    return s


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def rotation(group: Group, n: int, batch: tuple[int, ...], kind: Kind, rng: torch.Generator) -> Similarity:
    """A random rotation of n units: H D / √n for random signs D; or Hᵀ S H / n, which keeps the ones vector, for a
    random signed permutation S that leaves the first row of H. Where there is no H, or for "random", of the Haar
    measure of the group."""
    h = hadamard(n) if kind == "hadamard" else None
    if h is None:
        found = group.random(n, batch, rng)
        assert isinstance(found, Similarity)
        return found
    if isinstance(group, Centred):
        index = torch.cat([torch.zeros(*batch, 1, dtype=torch.int64), 1 + random_index(n - 1, batch, rng)], -1)
        signs = torch.cat([torch.ones(*batch, 1, dtype=torch.float64), random_signs((*batch, n - 1), rng)], -1)
        return Similarity(h.T @ (signs[..., None] * h[index]) / n)
    return Similarity(h * random_signs((*batch, 1, n), rng) / n**0.5)


def rotatable_streams(spec: Spec) -> list[Instance]:
    """The residual streams that may be rotated as the model is, and in which no output is."""
    return [
        instance
        for instance in spec.movable
        if anatomy(instance.axis) == "residual"
        and isinstance(spec.axes[instance.axis].group, Orthogonal | Centred)
        and instance.axis not in spec.shown
    ]


def stream_rotations(
    model: Model, how: Kind | Tensor, rng: torch.Generator
) -> tuple[dict[Instance, Element], list[str]]:
    """A rotation for each residual stream, and notes. how: a kind, or a matrix [n, n] for all streams.

    SymmetryError for a model none of whose streams may be rotated, and for a matrix that a stream does not allow;
    OptionError for one of another shape.
    """
    spec = model.spec
    streams = rotatable_streams(spec)
    if not streams:
        why = "its outputs are in the stream" if spec.shown else "its norms have gains, or it has no residual stream"
        raise SymmetryError(
            f"{model.name}: a {spec.family} like this has no residual stream that may be rotated: {why}; leave "
            "'rotate' out"
        )
    out: dict[Instance, Element] = {}
    for stream in sorted(streams):
        n, group = spec.axes[stream.axis].size, spec.axes[stream.axis].group
        assert group is not None
        if isinstance(how, Tensor):
            out[stream] = _given(how, stream, n, group)
        else:
            out[stream] = rotation(group, n, spec.batch(stream.axis), how, rng)
    return out, _notes(spec, out, how)


def _given(matrix: Tensor, stream: Instance, n: int, group: Group) -> Similarity:
    if tuple(matrix.shape) != (n, n):
        raise OptionError(f"rotate: the matrix is {list(matrix.shape)}, and {stream} needs [{n}, {n}]")
    g = Similarity(matrix.double())
    if not Orthogonal().contains(g, ATOL):
        worst = float((matrix.double().T @ matrix.double() - torch.eye(n, dtype=torch.float64)).abs().max())
        raise SymmetryError(f"rotate: the matrix is not orthogonal: QᵀQ − 1 has an entry of {worst:.2g}")
    if not group.contains(g, ATOL):
        raise SymmetryError(
            f"rotate: the matrix does not map the ones vector to itself, up to its sign, as {stream} needs, which "
            "LayerNorm reads"
        )
    u, _, vt = torch.linalg.svd(g.matrix)
    return Similarity(u @ vt)  # exactly orthogonal


def head_rotations(model: Model, kind: Kind, rng: torch.Generator) -> tuple[dict[Instance, Element], list[str]]:
    """A rotation of the values of each head, and notes; SymmetryError for a model in which none may be rotated."""
    spec = model.spec
    may = {n for n, a in spec.axes.items() if a.group is not None and "orthogonal" in subgroups(a.group, a.size)}
    heads = sorted(i for i in spec.movable if anatomy(i.axis) == "v" and i.axis in may)
    if not heads:
        groups = {a.group.label if a.group else "none" for n, a in spec.axes.items() if anatomy(n) == "v"}
        why = f"what may act on them is: {some(sorted(groups))}" if groups else "no values of heads are declared"
        raise SymmetryError(
            f"{model.name}: the values of heads of this {spec.family} may not be rotated: {why}; leave 'heads' out"
        )
    out: dict[Instance, Element] = {
        i: rotation(Orthogonal(), spec.axes[i.axis].size, spec.batch(i.axis), kind, rng) for i in heads
    }
    return out, _notes(spec, out, kind)


def _notes(spec: Spec, elements: Mapping[Instance, Element], how: Kind | Tensor) -> list[str]:
    if isinstance(how, Tensor) or how != "hadamard":
        return []
    sizes = {i.axis: spec.axes[i.axis].size for i in elements if hadamard(spec.axes[i.axis].size) is None}
    return [
        f"{axis}: no Hadamard matrix of size {n} is constructed here; its rotation is a random one"
        for axis, n in sizes.items()
    ]
