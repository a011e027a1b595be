"""The result of a transport: tensors that are computed when they are read, and the folder that they are written to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.arguments import checked
from symfuse.errors import CheckpointError
from symfuse.io import TensorInfo, scan
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.remote import Place
from symfuse.io.tensors import DTYPE_NAMES
from symfuse.io.writer import output_folder, write_tensors

Compute = Callable[[], Tensor]


def computed(what: str, infos: Mapping[str, TensorInfo], compute: Mapping[str, Compute]) -> Rewritten:
    """Tensors by name, each computed in float64 when it is read and rounded once to its dtype. what: the file or folder
    in whose dtypes they are, for errors."""

    def rule(name: str, info: TensorInfo) -> Rule:
        return Rule(info, lambda: compute[name]().reshape(info.shape), what="the transported tensor")

    return Rewritten(None, {name: rule(name, info) for name, info in infos.items()}, what)


Writer = Callable[[Path, Rewritten], None]


def write_safetensors(path: Path, tensors: Rewritten) -> None:
    write_tensors(path, tensors.infos, tensors.__getitem__)


@dataclass(frozen=True)
class Transported:
    """Something of a model A in the frame of A' = alignment(A).

    kind: "adapter", "vector", "probe", "sae" or "moments". tensors: by the names in the file, computed when they are
    read. file, writer: the name of the file that holds them, and what writes it. files: what goes beside it. notes:
    messages for the user. details: what was done, JSON data. sources: the files that were read, which are never
    written to.
    """

    kind: str
    tensors: Rewritten
    file: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Place, ...] = ()
    writer: Writer = write_safetensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @checked
    def save(self, folder: str | os.PathLike[str], extra: Mapping[str, str] | None = None) -> Path:
        """Write a new folder with the file and what goes beside it; extra: more files by name. It appears as a whole,
        or nothing does. OutputError if it exists, touches an input, or cannot be written."""
        files = {**self.files, **{name: text.encode() for name, text in (extra or {}).items()}}
        nbytes = sum(info.nbytes for info in self.tensors.infos.values()) + sum(map(len, files.values()))
        with output_folder(folder, nbytes, self.sources) as partial:
            self.writer(partial / self.file, self.tensors)
            for name, data in files.items():
                (partial / name).write_bytes(data)
        return Path(folder)


def wide(what: str, name: str, tensor: Tensor) -> Tensor:
    """A tensor that was read, in float64; CheckpointError if it holds no floating-point numbers, or NaN or infinity."""
    if not tensor.dtype.is_floating_point or tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{what}: {name!r} is {TensorInfo.of(tensor)}, expected floating-point numbers")
    scan(name, tensor, what)
    return tensor.to(torch.float64)


def sha256(path: Path) -> str:
    """Of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
