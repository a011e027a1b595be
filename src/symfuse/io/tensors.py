"""What a tensor is before anyone reads it: its dtype, its shape, the file that holds it, how to read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# The names of dtypes in safetensors headers, in the order by which that format sorts tensors (last first):
# wide dtypes come first in a file, so that each tensor starts at a multiple of its item size.
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and shape of a tensor, known without its data."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, and how to read it."""

    info: TensorInfo
    file: str
    read: Callable[[], Tensor]


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a folder's weight files by name; each is read when it is asked for, and not kept."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = dict(stored)
        self.infos: Mapping[str, TensorInfo] = {name: one.info for name, one in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def where(self, name: str) -> str:
        """The name of the file that holds this tensor."""
        return self._stored[name].file

    def renamed(self, old_names: Mapping[str, str]) -> StoredTensors:
        """The tensors under new names: `old_names` gives each new name's present one."""
        return StoredTensors({new: self._stored[old] for new, old in old_names.items()})
