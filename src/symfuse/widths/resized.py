"""A model in another shape: every tensor goes through the maps of its axes when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from symfuse.groups import Part
from symfuse.io import TensorInfo
from symfuse.io.lazy import Rewritten, Rule
from symfuse.model import Model, unstacked
from symfuse.rewriting.computed import reader
from symfuse.spec import Atom, Spec, anatomy
from symfuse.widths.maps import Duplication, Widening
from symfuse.widths.rules import HEADS, Maps, is_read
from symfuse.widths.shape import Shape


def resized(shape: Shape, maps: Maps, factors: Mapping[str, float], *, back: bool = False, name: str = "") -> Model:
    """The model in the shape of `shape`. factors: numbers by which some tensors are multiplied, by canonical name.
    back: through the left inverses of the maps, which make it narrower. A tensor is computed in float64 and rounded
    once, to its dtype. name: describes the result, for its name."""
    model, spec = shape.model, shape.spec
    whole = model.whole
    read = reader(model)

    def computed(one: str) -> Tensor:
        tensor = through(model.spec, spec, maps, one, read(one), back=back)
        return tensor * factors[one] if one in factors else tensor

    rules: dict[str, str | Rule] = {}
    for one, declared in spec.tensors.items():
        if (file := spec.file_name(one)) in whole:
            info = TensorInfo(whole.info(file).dtype, declared.layout.shape(spec.sizes))
            rules[file] = Rule(info, partial(computed, one), what="the tensor in its new shape")
    tensors = Rewritten(None, rules, whole.name)
    out = whole.replace(tensors=tensors, config=shape.config, name=f"{model.name} ({name})")
    checkpoint = unstacked(out, spec)
    spec.check({file: info.shape for file, info in checkpoint.infos.items()}, checkpoint.name)
    return replace(model, checkpoint=checkpoint, spec=spec)


def through(old: Spec, new: Spec, maps: Maps, name: str, tensor: Tensor, *, back: bool = False) -> Tensor:
    """A tensor in the sizes of a declaration through the maps of its axes into those of another one."""
    layout, index = old.tensors[name].layout, old.tensors[name].index
    shape = new.tensors[name].layout.shape(new.sizes)
    if layout != new.tensors[name].layout:  # sizes that no axis has
        return _fixed(tensor, shape)
    acting = {axis: widening for axis in old.order if (widening := maps.get(old.instance(axis, index))) is not None}
    if not any(axis in layout.names for axis in acting):
        return tensor
    out = tensor.new_empty(shape)
    order = list(acting)[::-1] if back else list(acting)  # what is inside of heads has the indices of the narrow ones
    for segment, target in zip(old.segments(name, tensor.contiguous()), new.segments(name, out), strict=True):
        view = segment.view
        for axis in order:
            for at, atom in enumerate(segment.atoms):
                if atom.name == axis:
                    part: Part = "dual" if is_read(segment.atoms, at) else _copied(atom)
                    view = _act(acting[axis], view, segment.atoms, at, old.batch_axes(axis), part, back=back)
        target.view.copy_(view)
    return out


def _copied(atom: Atom) -> Part:
    """The variance by which a part that does not read an axis is widened: keys, which are dual to queries, as the
    dual."""
    return "primal" if anatomy(atom.name) in HEADS else atom.variance.value


def _act(
    widening: Widening,
    view: Tensor,
    atoms: tuple[Atom, ...],
    at: int,
    batch: tuple[str, ...],
    part: Part,
    *,
    back: bool,
) -> Tensor:
    names = [atom.name for atom in atoms]
    front = [names.index(axis) for axis in batch]
    order = [*front, at, *(i for i in range(len(names)) if i not in (*front, at))]
    rows = view.permute(order)
    rows = (widening.back if back else widening.act)(rows, len(front), part)
    inverse = [order.index(i) for i in range(len(order))]
    return rows.permute(inverse)


def _fixed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A folded gain, whose entries are all equal, or a table that no axis reads: entries are repeated."""
    for dim, size in enumerate(shape):
        n = tensor.shape[dim]
        if size < n:
            tensor = tensor.narrow(dim, 0, size)
        elif size > n:
            tensor = Duplication.even(n, size).act(tensor.movedim(dim, 0), 0, "primal").movedim(0, dim)
    return tensor
