"""The wreath law: inverses and compositions of elements that are nested.

Elements of an axis with `per` are indexed by other axes, which may be permuted themselves. An element acts on the
inside first (indexed as the source is), then the outer permutation moves it along. From this follow, with σ the outer
permutation and h the inner elements:

    inverse:      h'[k] = h[σ(k)]⁻¹           composition (first 1, then 2):   h[k] = h₂[σ₁⁻¹(k)] h₁[k]

Both re-indexings are the action of the outer elements on the batch dimensions of the inner ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from symfuse.alignment.apply import act
from symfuse.groups import Element, compose
from symfuse.spec import Atom, Instance, Spec, Variance

Elements = Mapping[Instance, Element]


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
