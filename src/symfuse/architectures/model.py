"""A checkpoint together with its declaration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from symfuse.architectures.base import resolve
from symfuse.errors import IncompatibleError
from symfuse.io import Checkpoint, scan
from symfuse.spec import Axis, Spec


@dataclass(frozen=True)
class Model:
    """A checkpoint and its Spec, which it has been checked against; tensors are read by canonical name."""

    checkpoint: Checkpoint
    spec: Spec

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Model:
        """Resolve the family and check every name and shape, from headers alone.

        Raises UnknownArchitectureError, SpecError or LayoutError, each naming what does not fit.
        """
        spec = resolve(checkpoint.config, checkpoint, checkpoint.name)
        spec.check({name: checkpoint.info(name).shape for name in checkpoint}, checkpoint.name)
        return cls(checkpoint, spec)

    @property
    def name(self) -> str:
        return self.checkpoint.name

    def read(self, name: str) -> Tensor:
        """The tensor of that canonical name; CheckpointError if it holds NaN or infinity."""
        file_name = self.spec.file_name(name)
        tensor = self.checkpoint[file_name]
        scan(file_name, tensor, self.checkpoint.where(file_name))
        return tensor


def require_same_shape(models: Sequence[Model]) -> None:
    """IncompatibleError, with the first difference, unless the base models are of one family and size.

    Task heads may differ; whoever combines them decides what becomes of them.
    """
    first = models[0]
    for other in models[1:]:
        pair = f"{first.name} and {other.name}"
        if first.spec.family != other.spec.family:
            raise IncompatibleError(
                f"{pair}: one is a {first.spec.family}, the other a {other.spec.family}; only models of one "
                "family share their symmetries"
            )
        ours, theirs = _base_axes(first.spec), _base_axes(other.spec)
        for axis in ours:
            if axis in theirs and ours[axis] != theirs[axis]:
                raise IncompatibleError(f"{pair}: {_difference(axis, ours[axis], theirs[axis])}")
        base, others = (set(m.spec.tensors) - m.spec.heads - m.spec.tied.keys() for m in (first, other))
        if base != others:
            names = sorted(base ^ others)
            raise IncompatibleError(
                f"{pair}: {len(names)} tensors are in one model only: {', '.join(names[:5])}"
                f"{', …' if len(names) > 5 else ''}; remove that part from one or add it to the other"
            )


def _base_axes(spec: Spec) -> dict[str, Axis]:
    used = {key for declared in spec.tensors.values() for key in declared.index}
    for name, declared in spec.tensors.items():
        if name not in spec.heads:
            used |= {atom.name for atom in declared.layout.atoms()}
    return {name: axis for name, axis in spec.axes.items() if name in used}


def _difference(axis: str, ours: Axis, theirs: Axis) -> str:
    what = {
        "l": "numbers of layers",
        "h": "numbers of attention heads",
        "residual": "hidden sizes (residual stream)",
        "ffn": "feed-forward sizes",
        "vocab": "vocabulary sizes",
        "positions": "numbers of positions",
    }.get(axis, f"sizes of axis {axis!r}")
    if ours.size != theirs.size:
        return f"the {what} differ: {ours.size} and {theirs.size}; there is no exact map between them"
    names = [a.group.name if a.group else "none" for a in (ours, theirs)]
    return (
        f"axis {axis!r} has different symmetries ({names[0]} and {names[1]}): the configs differ in "
        "something that decides them, such as the activation"
    )
