"""Balance queries with keys, and values with outputs, of each head: a basis in which both sides have the same Gram
matrix; and both sides of each neuron that may be rescaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from symfuse.groups import Conformal, Element, Group, Invertible, Linear, Monomial, PositiveMonomial, SignedMonomial
from symfuse.groups.orthogonal import signs_of
from symfuse.model import Model
from symfuse.rewriting.computed import Formula, Read, computed, reader
from symfuse.spec import Atom, Instance, Spec, Variance

# As a share of the largest singular value of a head's circuit: smaller ones are rounding errors, and become zero.
ROUNDING = 1e-14
PLAIN = Variance.PLAIN


def balance(model: Model) -> Model:
    """Replace each pair of a head, Q [n, k] (primal) and K [n, m] (dual), by Σ^½ Uᵀ and Σ^½ Vᵀ, where QᵀK = U Σ Vᵀ. The
    circuit QᵀK stays the same, and QQᵀ = KKᵀ = Σ. Models that differ only in this basis become equal, unless two
    singular values are equal.

    A bias is a further column. One that may have any value (`Shift` without `into`) has no part in the choice of the
    basis, and is transformed with the rest. The basis is computed by two thin QR decompositions and one SVD of [n, n]
    for each head (Theus et al. 2025). Neurons that may be rescaled (after ReLU, or between up and down of a gated
    block) get |up_i| = |down_i|. Spaces with smaller groups (rotary positions, other neurons) are not changed, nor is
    an output space of the model. The declaration stays the same.
    """
    spec = model.spec
    free = {name for name, axis in spec.axes.items() if isinstance(axis.group, tuple(SOLVERS))} - spec.shown
    find = lru_cache(maxsize=None)(lambda instance: _balancing(spec, instance, reader(model)))
    rules: dict[str, list[Instance]] = {}
    for instance, names in spec.movable.items():
        if instance.axis in free and _is_pair(spec, instance, names):
            for name in names:
                atoms = spec.tensors[name].layout.atoms
                if any(atom.name == instance.axis and atom.variance is not PLAIN for atom in atoms):
                    rules.setdefault(name, []).append(instance)

    def rule(name: str, instances: list[Instance]) -> Formula:
        return lambda read: _transformed(spec, name, read(name), {i: find(i) for i in instances})

    return computed(model, {name: rule(name, instances) for name, instances in rules.items()})


def _is_pair(spec: Spec, instance: Instance, names: tuple[str, ...]) -> bool:
    """Whether both sides exist, and no part of a tensor has the axis twice."""
    parts = [part for name in names for part in spec.tensors[name].layout.parts]
    variances = [[atom.variance for atom in part if atom.name == instance.axis] for part in parts]
    sides = {variance for part in variances for variance in part} - {PLAIN}
    return max(map(len, variances)) == 1 and sides == {Variance.PRIMAL, Variance.DUAL}


def _balancing(spec: Spec, instance: Instance, read: Read) -> Element:
    """The element that balances both sides of an instance, each [*b, n, …] with all other dimensions of the part."""
    free = {(shift.bias, shift.axis) for shift in spec.shifts if shift.into is None}
    batch = len(spec.batch(instance.axis))
    sides: dict[Variance, list[Tensor]] = {Variance.PRIMAL: [], Variance.DUAL: [], PLAIN: []}
    for name in spec.movable[instance]:
        for atom, view in _views(spec, instance, name, read(name)):
            if (name, str(atom)) not in free:
                sides[atom.variance].append(view.reshape(*view.shape[: batch + 1], -1))
    group = spec.axes[instance.axis].group
    solve = next(solve for kind, solve in SOLVERS.items() if isinstance(group, kind))
    return solve(torch.cat(sides[Variance.PRIMAL], -1), torch.cat(sides[Variance.DUAL], -1))


def _basis(q: Tensor, k: Tensor) -> Linear:
    """T = Σ^-½ Vᵀ R_K, where R_Q R_Kᵀ = U Σ Vᵀ and Qᵀ = (…) R_Q, Kᵀ = (…) R_K; T⁻ᵀ = Σ^-½ Uᵀ R_Q.

    The sign of each row makes the largest entry of T Q positive. Rows of zero singular values are zero in both
    matrices, which are then not inverse to each other: the directions that they drop are not in the circuit.
    """
    rq, rk = (torch.linalg.qr(side.mT, mode="r").R for side in (q, k))
    u, s, vt = torch.linalg.svd(rq @ rk.mT, full_matrices=False)
    kept = s > ROUNDING * s[..., :1]
    root = torch.where(kept, torch.where(kept, s, 1.0).rsqrt(), 0.0)[..., None]
    t, dual = root * (vt @ rk), root * (u.mT @ rq)
    sign = signs_of(t @ q)[0][..., None]
    short = (0, 0, 0, t.shape[-1] - t.shape[-2])  # of a head that is larger than the space that it reads
    t, dual = (torch.nn.functional.pad(sign * m, short) for m in (t, dual))
    return Linear(t, dual.mT)


def _scales(up: Tensor, down: Tensor) -> Monomial:
    """√(|down_i| / |up_i|) for each unit; 1 where a side is zero, which no scale makes equal."""
    one, other = (torch.linalg.vector_norm(side, dim=-1) for side in (up, down))
    scale = torch.where((one > 0) & (other > 0), (other / one).sqrt(), 1.0)
    return Monomial(torch.arange(scale.shape[-1], device=scale.device).expand(scale.shape), scale)


def _signed_scales(up: Tensor, down: Tensor) -> Monomial:
    """The same, and the largest entry of each row of up positive."""
    scaling = _scales(up, down)
    assert scaling.scale is not None
    return Monomial(scaling.index, scaling.scale * signs_of(up)[0])


# By the group of an axis.
SOLVERS: Mapping[type[Group], Callable[[Tensor, Tensor], Element]] = {
    Conformal: _basis,
    Invertible: _basis,
    PositiveMonomial: _scales,
    SignedMonomial: _signed_scales,
}


def _views(spec: Spec, instance: Instance, name: str, tensor: Tensor) -> Iterator[tuple[Atom, Tensor]]:
    """Each part of a tensor that has the axis: its atom, and a view [*b, n, …] of the tensor."""
    batch = spec.batch_axes(instance.axis)
    for segment in spec.segments(name, tensor):
        names = [atom.name for atom in segment.atoms]
        if instance.axis in names:
            front = [*map(names.index, batch), names.index(instance.axis)]
            rest = [i for i in range(len(names)) if i not in front]
            yield segment.atoms[front[-1]], segment.view.permute(front + rest)


def _transformed(spec: Spec, name: str, tensor: Tensor, elements: dict[Instance, Element]) -> Tensor:
    out = tensor.clone(memory_format=torch.contiguous_format)
    for instance, element in elements.items():
        for atom, view in _views(spec, instance, name, out):
            view.copy_(element.part(atom.variance.value).act(view, len(element.batch)))
    return out
