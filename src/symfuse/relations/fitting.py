"""Two models of one family in one shape: of the deeper one some layers, of the wider one some neurons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from symfuse.alignment.apply import move
from symfuse.errors import IncompatibleError, SymfuseError
from symfuse.groups import Element, Signed, SignedMonomial
from symfuse.io import Checkpoint
from symfuse.matching.problem import alike_tied
from symfuse.model import Model
from symfuse.relations.moving import frame_of, settled
from symfuse.rewriting import canonical
from symfuse.spec import Instance, Spec, Variance, anatomy, layer_of
from symfuse.stats import weight_moments

SAME = 0.999  # the cosine of what writes two neurons, from which on they are copies


@dataclass(frozen=True)
class Fitted:
    """Both in one shape. layers: those of the deeper model that were taken, by layers of the other; depths: of both as
    they were; widths: axes whose sizes differed, with both."""

    source: Model
    anchor: Model
    layers: tuple[int, ...] | None = None
    depths: tuple[int, int] | None = None
    widths: tuple[tuple[str, int, int], ...] = ()


def fitted(source: Model, anchor: Model) -> Fitted:
    """Both models, cut to the smaller number of layers and of neurons where these differ.

    With tied heads untied, if those of one are. IncompatibleError if they are of different families, or differ in
    another size.
    """
    if source.spec.family != anchor.spec.family:
        raise IncompatibleError(
            f"{source.name} is a {source.spec.family}, {anchor.name} a {anchor.spec.family}: models of different "
            "families have no axes in common"
        )
    source, anchor = alike_tied(source, anchor)
    out = Fitted(source, anchor)
    sizes = [one.spec.sizes if one.declared else {} for one in (source, anchor)]
    differing = [axis for axis in sizes[0] if axis in sizes[1] and sizes[0][axis] != sizes[1][axis]]
    axes = [axis for axis in differing if anatomy(axis) in ("l", "ffn")]
    both = ", ".join(f"{axis} {sizes[0][axis]} and {sizes[1][axis]}" for axis in differing)
    if axes and axes != differing:
        raise IncompatibleError(
            f"{source.name} and {anchor.name} differ in size ({both}); models of other depths, or of other numbers of "
            "neurons, are compared if all other sizes are equal"
        )
    try:
        for axis in (axis for axis in axes if anatomy(axis) == "l"):
            out = _same_depth(out, axis)
        for axis in (axis for axis in axes if anatomy(axis) != "l"):
            out = _same_width(out, axis)
    except SymfuseError as error:
        raise IncompatibleError(f"{source.name} and {anchor.name} differ in size ({both}): {error}") from error
    return out


def _same_depth(pair: Fitted, axis: str) -> Fitted:
    depths = pair.source.spec.sizes[axis], pair.anchor.spec.sizes[axis]
    deep, shallow = (pair.source, pair.anchor) if depths[0] > depths[1] else (pair.anchor, pair.source)
    layers = chosen(_unlike(shallow, deep))
    return replace(_with(pair, deep, taken(deep, shallow, layers)), layers=layers, depths=depths)


def _with(pair: Fitted, old: Model, new: Model) -> Fitted:
    return replace(pair, source=new) if old is pair.source else replace(pair, anchor=new)


def taken(deep: Model, like: Model, layers: Sequence[int]) -> Model:
    """The model with these of its layers, in the shape of another."""
    tensors = {}
    for name, declared in deep.spec.tensors.items():
        at, stored = layer_of(declared.index), list(deep.spec.stored(name))
        places = [None] if at is None else [new for new, old in enumerate(layers) if old == at]
        for file in (file for file in stored if file in deep.checkpoint):
            for new in places:
                tensors[file if new is None else file.replace(f".{at}.", f".{new}.", 1)] = deep.checkpoint[file]
    return Model.of(Checkpoint(tensors, like.checkpoint.config, name=deep.name))


def _unlike(one: Model, other: Model) -> Float[Tensor, "l k"]:
    """How unlike the layers of two models are: the distance of the singular values of all their matrices, which no
    rotation or reordering changes, in the balanced form of their heads."""
    values = [_singular(model) for model in (one, other)]
    names = [name for name in values[0][0] if name in values[1][0]]
    rows = [torch.stack([torch.cat([layer[name] for name in names]) for layer in layers]) for layers in values]
    return torch.cdist(rows[0], rows[1])


def _singular(model: Model) -> list[dict[str, Tensor]]:
    """For each layer the singular values of each matrix, by its name without the number of the layer."""
    form = canonical(settled(model, frame_of([model])), ("balance",))
    layers: list[dict[str, Tensor]] = [{} for _ in range(model.spec.depth)]
    for name, declared in form.spec.tensors.items():
        at = layer_of(declared.index)
        if at is not None and len(declared.layout.dims) == 2:
            values = torch.linalg.svdvals(form.read(name).float())
            layers[at][name.replace(f".{at}.", ".*.", 1)] = values / values.norm().clamp_min(1e-30)
    return layers


def chosen(unlike: Float[Tensor, "l k"]) -> tuple[int, ...]:
    """The rising sequence of columns, one for each row, with the least sum of entries."""
    rows, columns = unlike.shape
    cost = torch.full((rows + 1, columns + 1), torch.inf, dtype=torch.float64)
    cost[0] = 0.0
    for i in range(rows):
        for j in range(i, columns):
            cost[i + 1, j + 1] = min(cost[i + 1, j], cost[i, j] + unlike[i, j])
    picked, j = [], columns
    for i in reversed(range(rows)):
        while cost[i + 1, j] == cost[i + 1, j - 1]:
            j -= 1
        j -= 1
        picked.append(j)
    return tuple(reversed(picked))


def _same_width(pair: Fitted, axis: str) -> Fitted:
    """Of the wider model the neurons that are nearest to those of the other, after the stream is matched by what is
    outside of layers; of neurons that are the same but for what is read of them, the sum is read."""
    sizes = pair.source.spec.sizes[axis], pair.anchor.spec.sizes[axis]
    wide, narrow = (pair.source, pair.anchor) if sizes[0] > sizes[1] else (pair.anchor, pair.source)
    aligned = _in_one_stream(narrow, wide)
    kept = {i: _copies(wide, i, _nearest(i, *aligned)) for i in narrow.spec.movable if i.axis == axis}
    return replace(_with(pair, wide, _selected(wide, narrow, kept)), widths=(*pair.widths, (axis, *sizes)))


def _copies(wide: Model, instance: Instance, index: Tensor) -> Tensor:
    """[n, m]: for each neuron that is kept 1 at its place among all, and at those of its copies (`SAME`)."""
    if index.ndim > 1:
        raise IncompatibleError(f"{wide.name}: {instance} are neurons of several experts, which are not selected")
    rows = [
        at.unfold(wide.read(name)).float()
        for name in wide.spec.movable[instance]
        for at in wide.spec.occurrences[name, instance.axis]
        if at.atom.variance is not Variance.DUAL
    ]
    written = _unit(torch.cat(rows, -1))
    alike = written[index] @ written.mT > SAME
    out = alike & (alike.sum(0) == 1)
    out[:, index] = False
    out[torch.arange(len(index)), index] = True
    return out.double()


def _in_one_stream(narrow: Model, wide: Model) -> tuple[Model, Model, Mapping[str, Element]]:
    """Both in one frame, and the elements that move the streams of the first onto those of the second."""
    frame = frame_of([narrow, wide])
    small, large = settled(narrow, frame), settled(wide, frame)
    elements: dict[str, Element] = {}
    for instance, touched in small.spec.movable.items():
        group = small.spec.axes[instance.axis].group
        names = [n for n in touched if len(small.spec.touched[n]) == 1 and small.spec.shares(n, large.spec)]
        if small.spec.is_shared(instance.axis) and names and group is not None:
            moments = weight_moments(small.spec, instance, large.read, small.read, group, names=names)
            elements[instance.axis] = group.best(moments)
    return small, large, elements


def _nearest(instance: Instance, narrow: Model, wide: Model, elements: Mapping[str, Element]) -> Tensor:
    """For each neuron of the narrow model the one of the wide model, no two the same, with the largest sum of cosines
    of their rows."""
    from scipy.optimize import linear_sum_assignment

    signed = isinstance(narrow.spec.axes[instance.axis].group, Signed | SignedMonomial)
    plain, others = (torch.zeros(()) for _ in range(2))
    for name in (n for n in narrow.spec.movable[instance] if len(narrow.spec.tensors[n].layout.dims) > 1):
        y, x = move(narrow.spec, elements, name, narrow.read(name)), wide.read(name)
        for here, there in zip(*(one.spec.occurrences[name, instance.axis] for one in (narrow, wide)), strict=True):
            ours, theirs = (_unit(at.unfold(t)) for at, t in ((here, y), (there, x)))
            if here.atom.variance is Variance.PLAIN:
                plain = plain + ours @ theirs.mT
            else:
                others = others + ours @ theirs.mT
    total = plain + (others.abs() if signed else others)
    flat = total.reshape(-1, *total.shape[-2:])
    index = [torch.as_tensor(linear_sum_assignment(one.numpy(), maximize=True)[1]) for one in flat]
    return torch.stack(index).reshape(total.shape[:-1])


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.float(), dim=-1)


def _selected(wide: Model, like: Model, kept: Mapping[Instance, Tensor]) -> Model:
    """The wide model with these neurons, in the shape of the narrow one."""
    tensors = {file: wide.checkpoint[file] for file in wide.checkpoint}
    for instance, copies in kept.items():
        for name in wide.spec.movable[instance]:
            file = wide.spec.file_name(name)
            tensors[file] = _picked(wide.spec, like.spec, name, tensors[file], instance.axis, copies)
    return Model.of(Checkpoint(tensors, like.checkpoint.config, name=wide.name))


def _picked(wide: Spec, small: Spec, name: str, tensor: Tensor, axis: str, copies: Tensor) -> Tensor:
    out = tensor.new_empty(small.tensors[name].layout.shape(small.sizes))
    index = copies.argmax(1)
    for there, here in zip(wide.segments(name, tensor), small.segments(name, out), strict=True):
        view = there.view
        for dim, atom in enumerate(there.atoms):
            if atom.name == axis and atom.variance is Variance.DUAL:
                view = torch.tensordot(copies, view.double(), ([1], [dim])).movedim(0, dim)
            elif atom.name == axis:
                view = view.index_select(dim, index)
        here.view.copy_(view)
    return out
