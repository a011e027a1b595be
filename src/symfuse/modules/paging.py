"""Live modules of models that do not fit into memory: each layer's weights are read when it runs, and freed after
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from symfuse.device import CPU
from symfuse.errors import CheckpointError
from symfuse.io import Checkpoint, scan
from symfuse.messages import some
from symfuse.model import as_declared
from symfuse.modules import build_module, stored_as, stored_names


def paged(checkpoint: Checkpoint, dtype: torch.dtype) -> nn.Module:
    """The module of a checkpoint as `symfuse.modules.live` makes it, but with no weights other than those of the part
    that runs: a layer (an entry of a list of modules), or what has weights of its own outside of layers.

    CheckpointError if it cannot be built, or has weights that are not whole tensors of the checkpoint, nor stacks that
    its family declares.
    """
    checkpoint = checkpoint.on(CPU)
    with _WithoutMemory():
        module = build_module(checkpoint, dtype)
    checkpoint = as_declared(checkpoint)
    files = _files(module, checkpoint)
    for owner in module.modules():
        for leaf, buffer in owner.named_buffers(recurse=False):
            if file := files.get((id(owner), leaf)):
                buffer.copy_(checkpoint[file])
    for part, whole in _parts(module):
        slots = []
        for owner in part.modules() if whole else [part]:
            for leaf, parameter in owner.named_parameters(recurse=False):
                slots.append(_Slot(owner, leaf, parameter, files[id(owner), leaf]))
        page = _Page(checkpoint, dtype, slots)
        part.register_forward_pre_hook(page.read)
        part.register_forward_hook(page.give_back, always_call=True)
    return module


class _WithoutMemory(TorchFunctionMode):
    """Matrices of parameters are made without memory; buffers, which modules compute, are as ever."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


@dataclass(frozen=True)
class _Slot:
    """Where a weight belongs. empty: what is there while it is not needed."""

    owner: nn.Module
    leaf: str
    empty: nn.Parameter
    file: str


@dataclass(frozen=True)
class _Page:
    """The weights of one part."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    slots: Sequence[_Slot]

    def read(self, *_: object) -> None:
        for slot in self.slots:
            with torch._C.DisableTorchFunction():  # a mode in which the module runs is not one for reading
                tensor = self.checkpoint[slot.file]  # as it is written, rounded to its dtype
                scan(slot.file, tensor, self.checkpoint.name)
                parameter = nn.Parameter(tensor.to(self.dtype), requires_grad=False)
            slot.owner.register_parameter(slot.leaf, stored_as(parameter, slot.file))

    def give_back(self, *_: object) -> None:
        for slot in self.slots:
            slot.owner.register_parameter(slot.leaf, slot.empty)


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The parts of a module whose weights come and go together, and whether all that is inside belongs to them: torch's
    attention reads the weights of its output projection without running it."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) or isinstance(child, nn.MultiheadAttention):
            yield child, True
        else:
            yield from _parts(child)
    if next(module.parameters(recurse=False), None) is not None:
        yield module, False


def _files(module: nn.Module, checkpoint: Checkpoint) -> dict[tuple[int, str], str]:
    """`stored_names`; CheckpointError if a weight has none."""
    files = stored_names(module, checkpoint)
    weights = dict(module.named_parameters(remove_duplicate=False))
    if lost := [name for name in weights if _owner(module, name) not in files]:
        raise CheckpointError(
            f"{checkpoint.name}: {type(module).__name__} does not have {some(lost)} as the files have them, so that it "
            "cannot be run layer by layer; take more memory (--memory), or leave the proof out (--no-verify)"
        )
    return files


def _owner(module: nn.Module, name: str) -> tuple[int, str]:
    at, _, leaf = name.rpartition(".")
    return id(module.get_submodule(at)), leaf
