"""Files of named arrays: safetensors, and npz without objects."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from symfuse.errors import CheckpointError
from symfuse.io.lazy import Rewritten, StoredTensor, StoredTensors
from symfuse.io.safetensors_file import read_safetensors
from symfuse.io.stamp import Stamp, refuse_pointer
from symfuse.io.tensors import TensorInfo, flat_part
from symfuse.messages import first_line, some
from symfuse.transporting.result import Writer, write_safetensors

SUFFIXES = (".safetensors", ".npz")


def read_arrays(path: Path) -> StoredTensors:
    """The tensors of a file. CheckpointError if it is absent, damaged, of another kind, or holds Python objects."""
    if not path.is_file():
        raise CheckpointError(f"{path} is not there; expected a file that ends in {' or '.join(SUFFIXES)}")
    if path.suffix == ".safetensors":
        stored = read_safetensors(path)
    elif path.suffix == ".npz":
        stored = _read_npz(path)
    else:
        raise CheckpointError(f"{path.name}: expected a file that ends in {' or '.join(SUFFIXES)}. ({path})")
    if not stored:
        raise CheckpointError(f"{path.name} holds no tensors. ({path})")
    return StoredTensors(stored)


def payload(folder: Path) -> Path:
    """The one file of arrays in a folder. CheckpointError if there is none, or more than one."""
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if len(files) != 1:
        there = some([path.name for path in files]) or "none"
        raise CheckpointError(f"{folder}: expected one file that ends in {' or '.join(SUFFIXES)}, found {there}")
    return files[0]


def writer_of(path: Path) -> Writer:
    """What writes a file of that name."""
    return _write_npz if path.suffix == ".npz" else write_safetensors


def _read_npz(path: Path) -> dict[str, StoredTensor]:
    stamp, out = Stamp.of(path), {}
    refuse_pointer(path)
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            for name in file.files:
                tensor = torch.from_numpy(np.array(file[name]))
                out[name] = _stored(stamp, path, tensor)
    except Exception as error:  # whatever zipfile and numpy raise for bytes that are none of theirs
        raise CheckpointError(
            f"{path.name} cannot be read as arrays of numbers: it is damaged, or holds Python objects, which can run "
            f"code when they are read. ({path}: {first_line(error)})"
        ) from error
    return out


def _stored(stamp: Stamp, path: Path, tensor: torch.Tensor) -> StoredTensor:
    def read() -> torch.Tensor:
        stamp.require_same()
        return tensor

    return StoredTensor(TensorInfo.of(tensor), path.name, read, lambda start, stop: flat_part(read(), start, stop))


def _write_npz(path: Path, tensors: Rewritten) -> None:
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(buffer, **arrays)
    path.write_bytes(buffer.getvalue())
