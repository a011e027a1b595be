"""The dtype and shape of a tensor, known before it is read, and checks of its values."""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from symfuse.errors import CheckpointError, IncompatibleError

# The names of dtypes in safetensors headers, in the order in which that format sorts tensors (last first): wide dtypes
# come first in a file, so that each tensor starts at a multiple of its item size.
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
BLOCK = 2**21  # elements per block of a streamed tensor
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
    """Elements of a tensor in row-major order; if it is not contiguous, only the rows that contain them are copied."""
    if tensor.ndim < 2 or tensor.is_contiguous():
        return tensor.reshape(-1)[start:stop]
    row = max(1, math.prod(tensor.shape[1:]))
    first, last = start // row, -(-stop // row)
    return tensor[first:last].reshape(-1)[start - first * row : stop - first * row]


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; integers never do.

    One sum is almost always enough: in IEEE arithmetic a sum with a NaN or an infinite term is never finite, so a
    finite sum proves that all terms are. If the sum overflows, all elements are checked.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()
    return cmath.isfinite(values.sum().item()) or bool(values.isfinite().all())


def scan(name: str, tensor: Tensor, where: str | None = None) -> None:
    """Raise CheckpointError, with the counts, if a tensor holds NaN or infinity.

    where: its file (`Checkpoint.where`).
    """
    if is_finite(tensor):
        return
    values = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    file = f" of {where}" if where else ""
    raise CheckpointError(
        f"{name!r}{file} holds {nan} NaN and {inf} infinite values among {tensor.numel()}, "
        "expected none. The model was damaged in training or saving; use an earlier checkpoint."
    )


def require_fit(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """IncompatibleError if finite values overflow in `dtype`, in which they will be stored."""
    if values.dtype == dtype or not values.numel() or not dtype.is_floating_point:
        return
    ends = torch.stack(torch.aminmax(values.detach().float() if values.dtype.itemsize == 1 else values.detach()))
    if not ends.to(dtype).double().isfinite().all():
        raise IncompatibleError(
            f"{name}: values from {ends[0]:g} to {ends[1]:g} do not fit in {str(dtype).removeprefix('torch.')}, the "
            "dtype of the output; use a wider one (out_dtype, --dtype, or a base that has it), or smaller weights"
        )
