"""Which tensors of two models differ, and how, in words: the place where a conversion went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from symfuse.architectures.base import is_declared
from symfuse.architectures.binding import resolve
from symfuse.errors import SymfuseError
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.rewriting.names import match_names
from symfuse.verification.coverage import Changed

NAMED = 3  # so many are looked for under other names, and named in a message
SEARCHED = 16  # among so many
LARGEST = 2**26  # entries of tensors that are looked for


def missing(before: Checkpoint, after: Checkpoint) -> dict[str, str]:
    """The tensors that one of two models of a declared family lacks, though its class needs them, and the other one has
    them; none if it has other tensors than its class, or neither model is whole."""
    for one, other in ((after, before), (before, after)):
        with suppress(SymfuseError):  # which is raised when it is run
            spec = resolve(one.config, one, one.name)
            lacking = [file for file, name in spec.files.items() if file not in one and name not in spec.tied]
            if lacking and all(name in spec.files or name in spec.buffers for name in one):
                whole = match_names(Model.of(other).checkpoint, one)[0]
                return dict.fromkeys(filter(whole.__contains__, lacking), f"is missing in {one.name}")
    return {}


def described(before: Checkpoint, after: Checkpoint, changed: Mapping[str, Changed]) -> dict[str, str]:
    """How tensors differ by more than rounding to the coarser dtype, by name, in the order of the first model.

    changed: those with equal names and shapes. For the first few, also which other tensor of the second model they are
    equal to, or whether they are there transposed or with their rows in another order.
    """
    beyond = [name for name in before if name in changed and float(changed[name].rows.max()) > _eps(changed[name])]
    out = {name: f"differs by {float(changed[name].rows.max()):.1e}" for name in beyond}
    for name in (one for one in beyond[:NAMED] if before.info(one).numel <= LARGEST):
        out[name] += _elsewhere(before, after, name, beyond)
    aliases = _not_compared(before) | _not_compared(after)
    for one, other in ((before, after), (after, before)):
        out |= {name: f"is in {one.name} only" for name in one if name not in other and name not in aliases}
    reshaped = [name for name in before if name in after and before.info(name).shape != after.info(name).shape]
    return out | {n: f"has shape {before.info(n).shape} and {after.info(n).shape}" for n in reshaped}


def _eps(changed: Changed) -> float:
    return max((torch.finfo(dtype).eps for dtype in changed.dtypes if dtype.is_floating_point), default=0.0)


def _not_compared(checkpoint: Checkpoint) -> set[str]:
    """What a file may have or lack: buffers, and other names of a tensor."""
    with suppress(SymfuseError):
        if is_declared(checkpoint.config):
            spec = resolve(checkpoint.config, checkpoint, checkpoint.name)
            return {*spec.buffers, *(spec.file_name(alias) for alias in spec.tied)}
    return set()


def _elsewhere(before: Checkpoint, after: Checkpoint, name: str, beyond: Sequence[str]) -> str:
    """What of the second model the tensor is equal to, in words; empty if nothing is."""
    value, shape = before[name], before.info(name).shape
    there = after[name]
    if len(shape) == 2 and shape[0] == shape[1] and _close(value, there.mT):
        return ": it is transposed"
    if len(shape) > 1 and _close(*(_ordered(t) for t in (value, there))):
        return ": its rows are in another order"
    alike = [one for one in beyond if one != name and after.info(one).shape == shape][:SEARCHED]
    same = next((one for one in alike if _close(value, after[one])), None)
    return "" if same is None else f": {after.name} has it as {same}"


def _close(one: Tensor, other: Tensor) -> bool:
    eps = max((torch.finfo(t.dtype).eps for t in (one, other) if t.is_floating_point()), default=0.0)
    return torch.allclose(one.double(), other.double(), rtol=eps, atol=eps * float(one.abs().max()))


def _ordered(tensor: Tensor) -> Tensor:
    """A number of each row, sorted."""
    rows = tensor.double().flatten(1)
    generator = torch.Generator().manual_seed(0)
    return (rows @ torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)).sort().values.to(tensor.dtype)
