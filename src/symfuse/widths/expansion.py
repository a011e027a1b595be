"""Expand a model to the shape of a wider one, exactly."""

from __future__ import annotations

from collections.abc import Mapping

from symfuse.errors import IncompatibleError, OptionError
from symfuse.model import Model, require_floating
from symfuse.spec import Instance
from symfuse.widths.maps import Duplication, Widening
from symfuse.widths.resized import resized
from symfuse.widths.rules import factors, normed, widenings
from symfuse.widths.shape import Shape, shape_of


def expand(model: Model, like: Model, copies: Mapping[Instance, Duplication] | None = None) -> Model:
    """The model in the shape of a wider one of its family and depth: it computes the same, up to rounding.

    Neurons, heads and other units that are treated one by one are copied, and the weights that read them are divided
    among the copies (unit i is a copy of unit i mod n, with equal shares). Spaces that are linear on both sides, such
    as the insides of heads, are padded with zeros, and the scale of the softmax is compensated. A residual stream is
    copied too, with equal numbers of copies, so that its norms have the same mean and variance; a stream that may be
    rotated (`canonical(model, rotatable(model.spec))`) is mapped by an isometry, to any larger size. A tied head is
    untied where its stream grows. The outputs of a bare model get the width of `like`: `widened(model, like)` has the
    map of that axis.

    copies: the copies of some instances of copied axes (`ffn[3]`), with their shares. Returns a lazy checkpoint with
    the config of the model, in the sizes of `like`, and its declaration. Raises IncompatibleError where no exact map is
    known, with the reason; OptionError for copies that do not fit.
    """
    shape = shape_of(model, like)
    require_floating(shape.model)
    maps = _with_copies(shape, widenings(shape, shape.model.spec, shape.spec), copies or {})
    if not maps:
        return shape.model
    return resized(shape, maps, factors(shape), name="expanded")


def widened(model: Model, like: Model) -> dict[Instance, Widening]:
    """The maps by which `expand` widens each axis instance: hidden states [..., n] → `maps[i].act(x.movedim(-1, 0), 0,
    "primal")` are those of the wider model, with the units in the first dimension."""
    shape = shape_of(model, like)
    return widenings(shape, shape.model.spec, shape.spec)


def _with_copies(
    shape: Shape, maps: Mapping[Instance, Widening], copies: Mapping[Instance, Duplication]
) -> dict[Instance, Widening]:
    out = dict(maps)
    for instance, duplication in copies.items():
        if not isinstance(maps.get(instance), Duplication):
            raise OptionError(f"copies: {instance} is not widened by copies; those that are: {_copied(maps)}")
        small, large = (spec.axes[instance.axis].size for spec in (shape.model.spec, shape.spec))
        if duplication.size != small or duplication.index.shape[-1] != large:
            raise OptionError(
                f"copies: {instance} has {small} units and is to have {large}; found copies of {duplication.size}, "
                f"{duplication.index.shape[-1]} in all"
            )
        if not duplication.balanced and (why := normed(shape.model.spec, instance.axis)):
            raise IncompatibleError(
                f"copies: {instance}: the units have not equally many copies, and equal shares. {why}"
            )
        out[instance] = duplication
    return out


def _copied(maps: Mapping[Instance, Widening]) -> str:
    return ", ".join(str(i) for i, widening in maps.items() if isinstance(widening, Duplication)) or "none"
