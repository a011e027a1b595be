"""Reading one file of `torch.save`, as data only: always with `weights_only`, which no option turns off."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.errors import CheckpointError
from symfuse.io.lazy import StoredTensor
from symfuse.io.remote import Place, Remote
from symfuse.io.stamp import PICKLE, ZIP, Stamp, substitute_in
from symfuse.io.tensors import TensorInfo, flat_part
from symfuse.messages import first_line, some

WRAPPERS = ("state_dict", "model", "module")  # the keys under which trainers nest the weights
LIGHTNING = "pytorch-lightning_version"  # whose modules hold the model as an attribute, before all of its names


def read_torch_file(path: Place) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The tensors of one file, memory-mapped where the file's format allows it, and notes for the user.

    Raises CheckpointError if the file cannot be read, holds code, or anything other than named tensors.
    """
    if isinstance(path, Remote):
        raise CheckpointError(
            f"{path.name}: only safetensors can be read tensor by tensor from a URL; download the folder, or convert "
            f"it. ({path})"
        )
    loaded = _Loaded(path, Stamp.of(path))
    tensors, how = loaded.tensors
    notes = () if how is None else (f"{path.name}: the weights were read from under {how}",)
    return {name: _stored(loaded, name, tensor) for name, tensor in tensors.items()}, notes


class _Loaded:
    """The tensors of one file, and the key they were under, if any; loaded once in each process that uses them."""

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self.path = path
        self.stamp = stamp

    def __reduce__(self) -> tuple[Any, ...]:
        return _Loaded, (self.path, self.stamp)

    @cached_property
    def tensors(self) -> tuple[dict[Any, Tensor], str | None]:
        loaded = load_data(self.path)
        return (loaded, None) if _is_state_dict(loaded) else _unwrap(self.path, loaded)

    def read(self, name: str) -> Tensor:
        self.stamp.require_same()  # reading a truncated mapped file would crash the process
        return self.tensors[0][name].detach()

    def part(self, name: str, start: int, stop: int) -> Tensor:
        return flat_part(self.read(name), start, stop)


def load_data(path: Path) -> Any:
    """The content of a file of torch.save, as data only, memory-mapped where possible. CheckpointError if it is
    damaged, or contains anything that could be code."""
    try:
        # Files older than PyTorch 1.6 are not zip archives and cannot be mapped.
        with warnings.catch_warnings(action="ignore"):  # about pickle protocols, in addition to an error
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if (seems := _seems(path)) and seems != "text":
            raise CheckpointError(f"{path.name} is not a PyTorch file; it is {seems}. ({path})") from error
        raise CheckpointError(
            f"{path.name} was not loaded: it is damaged, or holds Python objects besides tensors, which can "
            "run code when they are read. Save the weights alone, best as safetensors. "
            f"({path})"  # torch's own message advises to run the code
        ) from error
    except Exception as error:  # torch raises various errors for other files
        seems = _seems(path) or "cut short, or not a PyTorch file: copy or download it again"
        raise CheckpointError(f"{path.name} cannot be read; it is {seems}. ({path}: {first_line(error)})") from error


def _seems(path: Path) -> str:
    """The kind of a file that torch.save did not write; empty if unknown."""
    with suppress(OSError):
        return substitute_in(path, ours=(ZIP, PICKLE))
    return ""


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(one, Tensor) for one in value.values())


def _unwrap(path: Path, loaded: Any) -> tuple[dict[str, Tensor], str]:
    """The one known key of the top level that holds a dictionary of tensors, and its tensors; of Lightning without the
    name of the attribute that all names begin with."""
    if not isinstance(loaded, dict) or not loaded:
        raise CheckpointError(
            f"{path.name} holds {type(loaded).__name__}, expected a dictionary of named tensors. ({path})"
        )
    candidates = [key for key in WRAPPERS if _is_state_dict(loaded.get(key))]
    if len(candidates) != 1:
        others = [str(key) for key, value in loaded.items() if not isinstance(value, Tensor)]
        how = f"under each of {candidates}" if candidates else f"with other entries: {some(others)}"
        raise CheckpointError(
            f"{path.name} holds tensors {how}; expected tensors only, or one of the keys "
            f"{', '.join(WRAPPERS)} with a dictionary of tensors. Save the weights alone. ({path})"
        )
    tensors, how = loaded[candidates[0]], f"the key {candidates[0]!r}"
    attributes = {str(name).partition(".")[0] for name in tensors}
    if LIGHTNING in loaded and len(attributes) == 1 and not attributes & tensors.keys():
        (attribute,) = attributes
        tensors = {str(name).removeprefix(f"{attribute}."): tensor for name, tensor in tensors.items()}
        how += f", without the prefix {attribute!r} that Lightning's module gives them"
    return tensors, how


def _stored(loaded: _Loaded, name: Any, tensor: Tensor) -> StoredTensor:
    path = loaded.path
    if not isinstance(name, str):
        raise CheckpointError(f"{path.name}: the key {name!r} is not a tensor's name. ({path})")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantised" if tensor.is_quantized else "without data" if tensor.is_meta else str(tensor.layout)
        raise CheckpointError(f"{path.name}: {name!r} is {kind}, expected a dense tensor. ({path})")
    return StoredTensor(TensorInfo.of(tensor), path.name, partial(loaded.read, name), partial(loaded.part, name))
