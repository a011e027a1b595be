"""What a tensor is before anyone reads it: its dtype, its shape, the file that holds it, how to read it."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from symfuse.errors import IncompatibleError

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
BLOCK = 2**21  # elements that are read at once where a tensor is streamed
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
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def flat_part(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Elements of a tensor in row-major order; of odd strides, only the rows that hold them are copied."""
    if tensor.ndim < 2 or tensor.is_contiguous():
        return tensor.reshape(-1)[start:stop]
    row = max(1, math.prod(tensor.shape[1:]))
    first, last = start // row, -(-stop // row)
    return tensor[first:last].reshape(-1)[start - first * row : stop - first * row]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, and how to read it: whole, or the elements from `start` to `stop` of it as flat."""

    info: TensorInfo
    file: str
    read: Callable[[], Tensor]
    part: Callable[[int, int], Tensor]


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a folder's weight files by name; each is read when it is asked for, and not kept."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = dict(stored)
        self.infos: Mapping[str, TensorInfo] = {name: one.info for name, one in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of a tensor, flat, read without the rest where the file's format allows it."""
        return self._stored[name].part(start, stop)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor in parts of about BLOCK elements."""
        part, numel = self._stored[name].part, self.infos[name].numel
        return (part(start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK))

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


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; integers never do.

    One sum decides almost always: in IEEE arithmetic a sum with a NaN or an infinite term is never finite, so a finite
    sum proves that all terms are. A sum that overflowed proves nothing; then all are looked at.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()
    return cmath.isfinite(values.sum().item()) or bool(values.isfinite().all())


def require_fit(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """IncompatibleError if finite values are not so any more in `dtype`, in which they are to be stored."""
    if values.dtype == dtype or not values.numel() or not dtype.is_floating_point:
        return
    ends = torch.stack(torch.aminmax(values.detach().float() if values.dtype.itemsize == 1 else values.detach()))
    if not ends.to(dtype).double().isfinite().all():
        raise IncompatibleError(
            f"{name}: values from {ends[0]:g} to {ends[1]:g} do not fit in {str(dtype).removeprefix('torch.')}, the "
            "dtype of the output; take a wider one (out_dtype, --dtype, or a base that has it), or smaller weights"
        )
