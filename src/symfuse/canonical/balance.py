"""Queries with keys, and values with outputs, of each head in the one basis in which both sides weigh the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from symfuse.architectures import Model
from symfuse.canonical.computed import Read, Rule, computed, reader
from symfuse.groups import Conformal, Invertible, Linear
from symfuse.spec import Atom, Instance, Spec, Variance

# Of the largest singular value of a head's circuit: what is below it, is rounding, and becomes zero.
ROUNDING = 1e-14


def balance(model: Model) -> Model:
    """Each pair of a head, Q [n, k] (primal) and K [n, m] (dual), as Q ← Σ^½ Uᵀ and K ← Σ^½ Vᵀ, where the circuit
    QᵀK = U Σ Vᵀ: the same circuit, QQᵀ = KKᵀ = Σ. Bases of the same function agree, if its singular values differ.

    Biases are a last column, but for those that may be anything (`Shift` without `into`), which follow. By two thin QR
    decompositions and one SVD of [n, n] for each head (Theus et al. 2025). Spaces whose groups are smaller than the
    linear maps and their scales (rotary positions, neurons) are left as they are, and so is one that the model puts
    out. The declaration stays.
    """
    spec = model.spec
    shown = {atom.name for layout in spec.outputs.values() for atom in layout.atoms()} if not spec.heads else set()
    linear = {name for name, axis in spec.axes.items() if isinstance(axis.group, (Conformal, Invertible))} - shown
    find = lru_cache(maxsize=None)(lambda instance: _balancing(spec, instance, reader(model)))
    rules: dict[str, list[Instance]] = {}
    for instance, names in spec.movable.items():
        if instance.axis in linear and _is_pair(spec, instance, names):
            for name in names:
                rules.setdefault(name, []).append(instance)

    def rule(name: str, instances: list[Instance]) -> Rule:
        return lambda read: _moved(spec, name, read(name), {i: find(i) for i in instances})

    return computed(model, {name: rule(name, instances) for name, instances in rules.items()})


def _is_pair(spec: Spec, instance: Instance, names: tuple[str, ...]) -> bool:
    """Whether both sides are there, and no part of a tensor has the axis twice."""
    found = [[atom.variance for atom in part if atom.name == instance.axis] for n in names for part in _split(spec, n)]
    return max(map(len, found)) == 1 and {v for part in found for v in part} == {Variance.PRIMAL, Variance.DUAL}


def _split(spec: Spec, name: str) -> Iterator[tuple[Atom, ...]]:
    return spec.tensors[name].layout.parts()


def _balancing(spec: Spec, instance: Instance, read: Read) -> Linear:
    """T = Σ^-½ Vᵀ R_K, where R_Q R_Kᵀ = U Σ Vᵀ and Qᵀ = (…) R_Q, Kᵀ = (…) R_K; T⁻ᵀ = Σ^-½ Uᵀ R_Q.

    For the sign of each row, the largest entry of T Q is positive. Rows of singular values that are zero are zero in
    both matrices, which are then no inverses of each other: what they drop, the circuit never had.
    """
    free = {(shift.bias, shift.axis) for shift in spec.shifts if shift.into is None}
    batch = len(spec.batch(instance.axis))
    sides: dict[Variance, list[Tensor]] = {Variance.PRIMAL: [], Variance.DUAL: []}
    for name in spec.movable[instance]:
        for atom, view in _views(spec, instance, name, read(name)):
            if (name, str(atom)) not in free:
                sides[atom.variance].append(view.reshape(*view.shape[: batch + 1], -1))
    q, k = (torch.cat(side, -1) for side in sides.values())
    rq, rk = (torch.linalg.qr(side.mT, mode="r").R for side in (q, k))
    u, s, vt = torch.linalg.svd(rq @ rk.mT, full_matrices=False)
    kept = s > ROUNDING * s[..., :1]
    root = torch.where(kept, torch.where(kept, s, 1.0).rsqrt(), 0.0)[..., None]
    t, dual = root * (vt @ rk), root * (u.mT @ rq)
    rows = t @ q
    largest = rows.gather(-1, rows.abs().argmax(-1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(t.dtype)
    short = (0, 0, 0, t.shape[-1] - t.shape[-2])  # of a head that is wider than what it reads
    t, dual = (torch.nn.functional.pad(sign * m, short) for m in (t, dual))
    return Linear(t, dual.mT)


def _views(spec: Spec, instance: Instance, name: str, tensor: Tensor) -> Iterator[tuple[Atom, Tensor]]:
    """Each part of a tensor that has the axis: its atom there, and a view [*b, n, …] into the tensor."""
    batch = spec.batch_axes(instance.axis)
    for segment in spec.segments(name, tensor):
        names = [atom.name for atom in segment.atoms]
        if instance.axis in names:
            front = [*map(names.index, batch), names.index(instance.axis)]
            rest = [i for i in range(len(names)) if i not in front]
            yield segment.atoms[front[-1]], segment.view.permute(front + rest)


def _moved(spec: Spec, name: str, tensor: Tensor, elements: dict[Instance, Linear]) -> Tensor:
    out = tensor.clone(memory_format=torch.contiguous_format)
    for instance, element in elements.items():
        for atom, view in _views(spec, instance, name, out):
            view.copy_(element.part(atom.variance.value).act(view, len(element.batch)))
    return out
