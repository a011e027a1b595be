"""Spaces of a model by the names of its axes, and how vectors and linear forms in them are transformed.

A vector of a space is transformed by its element, v → g v; a linear form by the dual, w → g⁻ᵀ w: w·v does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.errors import LayoutError, OptionError, SymmetryError
from symfuse.groups import Centred, Orthogonal
from symfuse.messages import some, suggestion
from symfuse.spec import Atom, Axis, Declared, Instance, Layout, Spec, Variance
from symfuse.spec.layout import Node, Product
from symfuse.transporting.declared import WITHOUT, atoms_of, require_alone, varied, with_tensors

# The share of a linear form's norm below which its part along the ones vector counts as rounding.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Space:
    """A space of a model as a dimension of vectors. node: the axes of that dimension; head: the number of the head, if
    the vectors belong to one head alone."""

    alignment: Alignment
    instance: Instance
    node: Node
    size: int
    head: int | None = None

    def move(self, rows: Tensor, *, dual: bool = False) -> Tensor:
        """Transform vectors [n, size], or with `dual` linear forms."""
        spec = self.alignment.spec
        index = spec.index_of(self.instance)
        node = varied(self.node, {Variance.PRIMAL: Variance.DUAL}) if dual else self.node
        layout = Layout((Atom("rows"), node))
        heads = 1 if self.head is None else spec.batch(self.instance.axis)[0]
        alignment = with_tensors(self.alignment, {"rows": Declared(layout, index)}, {"rows": Axis(len(rows))})
        if self.head is None:
            return alignment.move("rows", rows)
        whole = rows.new_zeros(len(rows), heads, self.size)
        whole[:, self.head] = rows
        return alignment.move("rows", whole.flatten(1)).reshape(whole.shape)[:, self.aligned_head]

    @property
    def aligned_head(self) -> int | None:
        """The number of the head in the aligned model."""
        if self.head is None:
            return None
        (per,) = self.alignment.spec.batch_axes(self.instance.axis)
        index = self.alignment.spec.index_of(self.instance)
        element = self.alignment.elements.get(self.alignment.spec.instance(per, index))
        if element is None:
            return self.head
        marks = torch.zeros(element.size)
        marks[self.head] = 1
        return int(element.forget().act(marks, 0).argmax())

    @property
    def label(self) -> str:
        """The name of the space; of one head, with its number in the aligned model."""
        if self.head is None:
            return str(self.instance)
        return str(Instance(self.instance.axis, (*self.instance.index, self.aligned_head or 0)))

    @property
    def translated(self) -> bool:
        """Whether the alignment adds a constant to activations in this space: keys or values whose bias it
        translates."""
        spec, shifts = self.alignment.spec, self.alignment.shifts
        return any(
            bool(spec.part(rule.bias, shifts[rule.bias], rule.axis).view.any())
            for rule in spec.shifts
            if rule.bias in shifts
            and spec.instance(rule.axis.strip("*"), spec.tensors[rule.bias].index) == self.instance
        )

    def require_unbound(self, what: str) -> None:
        """SymmetryError if the alignment has gauges in this space: they rely on activations that have no component
        along a direction, and vectors that are added may have one (Alignment.gauges)."""
        spec = self.alignment.spec
        for gain, reader in self.alignment.gauged.items():
            if self.instance.axis in spec.tensors[gain].layout.names:
                raise SymmetryError(
                    f"{what}: this alignment changes {reader} along a direction that the output of the norm {gain} "
                    f"never has, but that added vectors may have. {WITHOUT}"
                )

    @property
    def centred(self) -> bool:
        """Whether the frame subtracts the mean from what is written into this space."""
        return "centre" in self.alignment.frame and isinstance(self._axis.group, Centred)

    @property
    def _axis(self) -> Axis:
        return self.alignment.spec.axes[self.instance.axis]

    def keeps_norms(self, *, mean: bool) -> bool:
        """Whether the element keeps the norm of vectors, and with `mean` their mean up to a sign."""
        element = self.alignment.elements.get(self.instance)
        group = Centred() if mean else Orthogonal()
        return element is None or group.contains(element, 1e-6)

    def require_readable(self, what: str, forms: Tensor) -> None:
        """SymmetryError if linear forms [n, size] of this space would have other values in the aligned model: because
        of a constant that the alignment adds, or a mean that its frame subtracts."""
        if self.translated:
            raise SymmetryError(
                f"{what}: this alignment translates {self.instance} by a constant, which would change what is read "
                "from this space. Make an alignment without translations (`symfuse align --no-biases`)"
            )
        along = forms.sum(1).abs() / forms.shape[1] ** 0.5
        if self.centred and bool((along > ROUNDING * forms.norm(dim=1)).any()):
            raise SymmetryError(
                f"{what}: the frame of this alignment subtracts the mean from the stream ({self.instance}), and some "
                "rows depend on that mean. If it was trained on a stream without its mean, subtract from each row its "
                "own mean; else make an alignment without a frame (--group residual=permutation)"
            )


def space_of(alignment: Alignment, text: str, size: int) -> Space:
    """The space of a name such as "residual", "ffn[3]", "v[3]" (all heads, in the order of a projection's outputs) or
    "v[3,2]" (head 2 alone), in which vectors have that size.

    Raises OptionError, with the choices, for an axis or an index that the model does not have, or another size;
    SymmetryError for axes that no element acts on.
    """
    try:
        named = Instance.parse(text)
    except LayoutError as error:
        raise OptionError(str(error)) from error
    spec = alignment.spec
    if named.axis not in spec.axes:
        known = sorted({instance.axis for instance in spec.movable})
        raise OptionError(
            f"no axis is called {named.axis!r}{suggestion(named.axis, known)}; there are {', '.join(known)}"
        )
    if spec.axes[named.axis].group is None:
        raise SymmetryError(
            f"axis {named.axis!r} is never transformed: vectors in it fit the aligned model as they are"
        )
    count = sum(per in spec.index_axes for per in spec.axes[named.axis].per)
    instance = Instance(named.axis, named.index[:count])
    there = [one for one in spec.movable if one.axis == named.axis]
    if instance not in there:
        words = some(map(str, there), 3) if there else "none: no tensor of this model has that axis"
        raise OptionError(f"there is no {text!r}; expected one of {words}")
    if len(named.index) > count:
        return _of_one_head(alignment, named, instance, size)
    nodes = {Layout((node,)).shape(spec.sizes)[0]: node for node in _nodes(spec, instance)}
    if size not in nodes:
        sizes = ", ".join(f"{one} ({node})" for one, node in sorted(nodes.items()))
        raise OptionError(f"vectors of {text} have the size {sizes}; found {size}. Do they belong to this model?")
    require_alone(spec, text, (nodes[size],))
    return Space(alignment, instance, nodes[size], size)


def _of_one_head(alignment: Alignment, named: Instance, instance: Instance, size: int) -> Space:
    spec = alignment.spec
    outer, sizes = spec.batch_axes(named.axis), spec.batch(named.axis)
    rest = named.index[len(instance.index) :]
    if len(outer) != 1 or len(rest) != 1:
        raise OptionError(f"{named} names no head of {instance}; give the vectors of all heads, as {instance}")
    if rest[0] >= sizes[0]:
        raise OptionError(f"{named}: its last index, of {outer[0]!r}, is 0 to {sizes[0] - 1}")
    if size != spec.axes[named.axis].size:
        raise OptionError(f"vectors of {named}, one head, have the size {spec.axes[named.axis].size}; found {size}")
    return Space(alignment, instance, Product((Atom(outer[0]), Atom(named.axis))), size, rest[0])


def _nodes(spec: Spec, instance: Instance) -> Iterator[Node]:
    """The forms in which tensors have a space, without variances: alone, with its heads, with its planes."""
    plain = {Variance.DUAL: Variance.PRIMAL, Variance.PLAIN: Variance.PRIMAL}
    for name in spec.movable[instance]:
        for dim in spec.tensors[name].layout.dims:
            for parts in Layout((dim,)).parts:
                if any(atom.name == instance.axis for atom in parts):
                    yield varied(_node(dim, parts), plain)


def _node(dim: Node, parts: tuple[Atom, ...]) -> Node:
    return dim if atoms_of((dim,)) == parts else parts[0] if len(parts) == 1 else Product(parts)
