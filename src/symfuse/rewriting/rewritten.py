"""A checkpoint with other names, or more or fewer tensors: read, copied or created lazily."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.tensors import flat_part


def rewritten(checkpoint: Checkpoint, rules: Mapping[str, str | Rule]) -> Checkpoint:
    """The checkpoint with tensors by these rules."""
    return checkpoint.replace(tensors=Rewritten(checkpoint, rules))


def _held(tensor: Tensor) -> Rule:
    """A tensor in memory."""
    return Rule(TensorInfo.of(tensor), lambda: tensor, part=partial(flat_part, tensor))


def renamed(checkpoint: Checkpoint, old: Mapping[str, str]) -> Checkpoint:
    """The tensors that `old` names, by new name → present name."""
    return rewritten(checkpoint, old)


def drop(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """The checkpoint without these tensors."""
    gone = set(names)
    return renamed(checkpoint, {name: name for name in checkpoint if name not in gone}) if gone else checkpoint


def zero_biases(checkpoint: Checkpoint, infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with zero biases of these names and shapes beside its weights. config: fields that say so."""
    rules: dict[str, str | Rule] = {name: name for name in checkpoint}
    for name, info in infos.items():
        zero = torch.zeros((), dtype=checkpoint.info(name.removesuffix("bias") + "weight").dtype)
        rules[name] = _held(zero.expand(info.shape))
    return rewritten(checkpoint, rules).replace(config={**checkpoint.config, **config})


def with_values(checkpoint: Checkpoint, values: Mapping[str, Tensor]) -> Checkpoint:
    """The checkpoint with these tensors in place of its own."""
    return rewritten(checkpoint, {name: _held(values[name]) if name in values else name for name in checkpoint})
