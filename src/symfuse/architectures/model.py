"""A checkpoint together with its declaration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symfuse.architectures.base import Config, lookup, resolve
from symfuse.architectures.feed_forward import SAME
from symfuse.errors import CheckpointError, IncompatibleError, SpecError
from symfuse.io import Checkpoint
from symfuse.io.messages import some
from symfuse.spec import Axis, Spec

# What decides the function beside the fields that the declaration reads, and its default where families share one.
SCALARS: dict[str, Any] = {
    "layer_norm_eps": None, "layer_norm_epsilon": None, "is_decoder": False, "position_embedding_type": "absolute",
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "norm_first": False,
}  # fmt: skip
OF_HEADS = {"architectures", "id2label", "num_labels", "tie_word_embeddings", "legacy", "encoder_stride"}


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
        return self.checkpoint.read(self.spec.file_name(name))


def require_same_shape(models: Sequence[Model]) -> None:
    """IncompatibleError, with the first difference, unless the base models are of one family and size.

    Task heads may differ; whoever combines them decides what becomes of them.
    """
    for model in models:
        _require_equal_ties(model)
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
        _require_same_function(first.checkpoint, other.checkpoint, pair)
        base, others = (set(m.spec.tensors) - m.spec.heads - m.spec.tied.keys() for m in (first, other))
        if base != others:
            names = sorted(base ^ others)
            raise IncompatibleError(
                f"{pair}: {len(names)} tensors are in one model only: {some(names)}; "
                "remove that part from one or add it to the other"
            )


def require_floating(model: Model) -> None:
    """CheckpointError if a tensor holds integers: rotated they would be something else after rounding."""
    infos = {
        file: model.checkpoint.info(file)
        for file in map(model.spec.file_name, model.spec.tensors)
        if file in model.checkpoint
    }
    if wrong := [f"{file} ({info})" for file, info in infos.items() if not info.dtype.is_floating_point]:
        raise CheckpointError(
            f"{model.name}: expected floating-point weights, found {some(wrong)}; convert the model first"
        )


def _require_equal_ties(model: Model) -> None:
    """SpecError if a file holds a tied tensor beside the one that it should equal, and they differ."""
    for alias, name in model.spec.tied.items():
        file, other = model.spec.file_name(alias), model.spec.file_name(name)
        if file not in model.checkpoint:
            continue
        one, two = model.checkpoint[file], model.checkpoint[other]
        if one.dtype != two.dtype or not torch.equal(one, two):
            raise SpecError(
                f"{model.name}: config.json says that {file} is {other} (tie_word_embeddings), and the stored tensors "
                "differ; set tie_word_embeddings to false if both are meant, or remove the first"
            )


def _require_same_function(one: Checkpoint, other: Checkpoint, pair: str) -> None:
    """IncompatibleError if the configs differ in a field that changes what the same weights compute."""
    ours, theirs = _deciding(one), _deciding(other)
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            raise IncompatibleError(
                f"{pair}: config.json differs in {key}: {ours[key]!r} and {theirs[key]!r}, so that the same weights "
                "compute something else; make them equal if one of them is wrong"
            )


def _deciding(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields that decide the function of the base model: those that its declaration reads, and SCALARS."""
    c = Config(checkpoint.config, str(checkpoint.config["model_type"]))
    try:
        lookup(checkpoint.config, checkpoint.name).declare(c)
        for key, default in SCALARS.items():
            c.get(key, default)
    except SpecError as error:
        raise SpecError(f"{checkpoint.name}: {error}") from None
    seen = {key: value for key, value in c.seen.items() if value is not None and key not in OF_HEADS}
    return {key: SAME.get(str(value), value) for key, value in seen.items()}


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
