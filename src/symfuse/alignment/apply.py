"""Apply elements and translations to one tensor of a declaration: for alignments, and with a graph for learning.

Nothing here rounds twice or breaks the graph: where elements are made of parameters, what they move depends on them.

Inverses and compositions of elements that are nested follow the wreath law. Elements of an axis with `per` are indexed
by other axes, which may be permuted themselves. An element acts on the inside first (indexed as the source is), then
the outer permutation moves it along. From this follow, with σ the outer permutation and h the inner elements:

    inverse:      h'[k] = h[σ(k)]⁻¹           composition (first 1, then 2):   h[k] = h₂[σ₁⁻¹(k)] h₁[k]

Both re-indexings are the action of the outer elements on the batch dimensions of the inner ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from symfuse.groups import Action, Element, compose
from symfuse.spec import Atom, Instance, Shift, Spec, Variance, bias_of, cut

A = TypeVar("A", bound=Action)
Elements = Mapping[Instance, Element]


def acting(spec: Spec, elements: Mapping[Instance, A], name: str) -> dict[str, A]:
    """The elements that act on the tensor of that canonical name, by axis, in the order in which they act."""
    return {
        axis: element
        for axis, instance in spec.touched[name].items()
        if (element := elements.get(instance)) is not None
    }


def move(spec: Spec, by: Mapping[str, Action], name: str, tensor: Tensor) -> Tensor:
    """The tensor of that canonical name transformed by the elements of its axes (see `acting`), in its own dtype.

    Permutations and signs only reorder entries; other elements compute in at least float32 and round once.
    """
    if not by:
        return tensor
    exact = tensor.dtype == torch.float64 or all(element.reorders_only for element in by.values())
    work = tensor if exact else tensor.float()
    views, parts = spec.views(name, work), spec.tensors[name].layout.parts
    if len(views) == 1:
        result = _act_all(spec, by, views[0], parts[0]).reshape(work.shape)
        return result.to(tensor.dtype)
    out = torch.empty_like(work, memory_format=torch.contiguous_format)
    for view, cuts, atoms in zip(views, spec.cuts[name], parts, strict=True):
        # One at a time: where autograd records, a view that was made before another is written may not be written to.
        cut(out, cuts).copy_(_act_all(spec, by, view, atoms))
    return out.to(tensor.dtype)


def _act_all(spec: Spec, by: Mapping[str, Action], view: Tensor, atoms: tuple[Atom, ...]) -> Tensor:
    for axis, element in by.items():
        for dim, atom in enumerate(atoms):
            if atom.name == axis:
                view = act(element.part(atom.part), view, dim, atoms, spec.batch_axes(axis))
    return view


def act(element: Action, view: Tensor, dim: int, atoms: tuple[Atom, ...], batch: tuple[str, ...]) -> Tensor:
    """Act along `dim` of a view whose leading dimensions are `atoms`; the batch axes are brought to the front."""
    if not batch:
        return element.act(view, dim)
    names = [atom.name for atom in atoms]
    front = [*map(names.index, batch)]
    order = front + [i for i in range(view.ndim) if i not in front]
    back = [*map(order.index, range(view.ndim))]
    return element.act(view.permute(order), order.index(dim)).permute(back)


def shifted(spec: Spec, shifts: Mapping[str, Tensor], gauges: Mapping[str, Tensor]) -> frozenset[str]:
    """The tensors that translations and gauges change: biases translated, and those that translated ones move on into;
    readers of norms, and their biases."""
    rules = [rule for rule in spec.shifts if rule.bias in shifts]
    into = {rule.into for rule in rules if rule.into is not None}
    return frozenset([*shifts, *into, *gauges, *map(bias_of, gauges)])


def shift(
    spec: Spec,
    shifts: Mapping[str, Tensor],
    gauges: Mapping[str, Tensor],
    name: str,
    tensor: Tensor,
    weight: Callable[[str], Tensor],
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The aligned tensor of that name with its part of translations and gauges, computed in `dtype`; weight(name) reads
    another aligned one."""
    out = tensor.to(dtype)
    if name in shifts:
        out = out + shifts[name].to(dtype)
    for rule in spec.shifts:
        if rule.into == name and rule.bias in shifts and rule.weight is not None:
            out = out - _through(spec, rule, shifts[rule.bias].to(dtype), weight(rule.weight)).reshape(out.shape)
    for reader, v in gauges.items():
        gain = spec.gauges[reader]
        if name == reader:
            dim = spec.read_dim(reader)
            n = void(weight(gain).to(dtype))
            out = out + v.to(dtype).unsqueeze(dim) * n.reshape([-1 if i == dim else 1 for i in range(out.ndim)])
        elif name == bias_of(reader):
            out = out - v.to(dtype) * (void(weight(gain).to(dtype)) @ weight(bias_of(gain)).to(dtype))
    return out.to(tensor.dtype)


def void(gain: Tensor) -> Tensor:
    """The unit vector n with n · (x − β) = 0 for all x = γ ⊙ y + β with Σ y = 0: along 1/γ, or where gains are zero
    along those."""
    least = gain.abs().min()
    n = torch.where(least > 0, least / torch.where(gain == 0, 1.0, gain), (gain == 0).to(gain.dtype))
    unit: Tensor = n / n.norm()
    return unit


def _through(spec: Spec, rule: Shift, translation: Tensor, weight: Tensor) -> Tensor:
    """weight @ t for the part of the translation t that the rule moves, with the axes of rule.into left."""
    t = spec.part(rule.bias, translation, rule.axis).view
    left: Tensor = torch.tensordot(t, spec.through(rule, weight.to(t.dtype)), t.ndim)
    return left


def inverse(spec: Spec, elements: Elements, instance: Instance) -> Element | None:
    """The element that an instance has in the inverse; None where that is the identity."""
    element = elements.get(instance)
    return None if element is None else _reindexed(spec, instance, element.inverse(), elements.get)


def composed(spec: Spec, elements: Elements, first: Elements) -> dict[Instance, Element]:
    """The elements that act as `first`, which are of `spec`, then as `elements`."""
    out = dict(first)
    for instance, element in elements.items():
        if instance not in spec.movable:
            continue
        element = _reindexed(spec, instance, element, lambda outer: inverse(spec, first, outer))
        out[instance] = compose(element, out[instance]) if instance in out else element
    return out


def _reindexed(spec: Spec, instance: Instance, element: Element, by: Callable[[Instance], Element | None]) -> Element:
    """Let the elements of the axes that `instance` is batched over act on its batch dimensions. by: the element of an
    instance; None for the identity."""
    batch = spec.batch_axes(instance.axis)
    if not batch:
        return element
    index = spec.index_of(instance)
    outer = {per: g.forget() for per in batch if (g := by(spec.instance(per, index))) is not None}
    if not outer:
        return element
    atoms = tuple(Atom(per, Variance.PLAIN) for per in batch)
    tensors = dict(element.tensors())
    for per in sorted(outer, key=spec.order.index):
        for key, tensor in tensors.items():
            tensors[key] = act(outer[per], tensor, batch.index(per), atoms, spec.batch_axes(per))
    return element.rebuild(tensors)
