"""Reading one safetensors file: its header is checked against its size first, then each tensor is read on demand.

A memory-mapped file that was truncated, or has bytes appended, may read as zeros or old data without an error; so the
header is checked here, before any tensor is read. Format: 8 bytes, the length N of the header (little-endian); N bytes
of JSON; then the tensors' bytes, without gaps.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from symfuse.arguments import require_type
from symfuse.errors import CheckpointError, LayoutError
from symfuse.io.lazy import StoredTensor
from symfuse.io.remote import Place, Remote, read_range
from symfuse.io.stamp import Stamp, substitute_in
from symfuse.io.tensors import DTYPES, TensorInfo

_ENTRY = {"dtype": str, "shape": list[int], "data_offsets": tuple[int, int]}
MAX_HEADER = 100_000_000  # the limit of the safetensors library


def read_safetensors(path: Place) -> dict[str, StoredTensor]:
    """The tensors of one file, by name; only the header is read. From a URL each tensor is requested as a byte range.

    Raises CheckpointError if the file's size is not the one that its header implies, or its header is bad.
    """
    stored: dict[str, StoredTensor] = {}
    stamp = Stamp.of(path)
    end = 0
    header, header_size = _header(path, stamp.size)
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info, stop = _entry(path, name, entry)
        end = max(end, stop)
        spans.append((stop - info.nbytes, stop))
        part = partial(_part, stamp, info.dtype, header_size + stop - info.nbytes)
        stored[name] = StoredTensor(info, path.name, partial(_whole, part, info), part)
    actual, expected = stamp.size, header_size + end
    if actual != expected:
        fault = "cut short" if actual < expected else "longer than its header says"
        raise CheckpointError(
            f"{path.name} is {fault}: expected {expected} bytes (header {header_size} + tensors {end}), "
            f"found {actual}. Copy or download the file again. ({path})"
        )
    if isinstance(path, Remote):
        _require_tiled(path, spans)
        return stored
    try:
        with safe_open(path, framework="pt"):
            pass  # the library's own checks: gaps and overlaps between tensors
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} has an invalid header: {error}. ({path})") from error
    except (OSError, RuntimeError) as error:
        raise stamp.failed(error) from error
    return stored


def _header(path: Place, actual: int) -> tuple[dict[str, Any], int]:
    """The parsed header, and the position of the first tensor byte. actual: the size of the file."""
    prefix = read_range(path, 0, 8)
    if len(prefix) < 8:
        what = "empty" if not prefix else "cut short"
        raise CheckpointError(
            f"{path.name} is {what}: expected at least 8 bytes, found {actual}. "
            f"Copy or download the file again. ({path})"
        )
    (length,) = struct.unpack("<Q", prefix)
    if not 0 < length <= MAX_HEADER:
        what = substitute_in(path) or "something else: the length of its header makes no sense"
        raise CheckpointError(f"{path.name} is not a safetensors file; it is {what}. ({path})")
    if 8 + length > actual:
        raise CheckpointError(
            f"{path.name} is cut short inside its header: expected at least {8 + length} bytes, "
            f"found {actual}. Copy or download the file again. ({path})"
        )
    text = read_range(path, 8, 8 + length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} has a header that is not JSON: {error}. ({path})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name} has a header that is not a JSON object. ({path})")
    return header, 8 + length


def _entry(path: Place, name: str, entry: Any) -> tuple[TensorInfo, int]:
    """One tensor's info, and the position after its last byte."""
    try:
        require_type(entry, _ENTRY, name)
    except LayoutError as error:
        raise CheckpointError(f"{path.name}: the header's entry for {name!r} is not valid: {error}. ({path})") from None
    dtype_name, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if min(start, stop, *shape) < 0:
        raise CheckpointError(f"{path.name}: the header's entry for {name!r} has negative numbers: {entry}. ({path})")
    if dtype_name not in DTYPES:
        raise CheckpointError(
            f"{path.name}: {name!r} has dtype {dtype_name}, which symfuse does not read; expected one of "
            f"{', '.join(DTYPES)}. Convert the model first. ({path})"
        )
    info = TensorInfo(DTYPES[dtype_name], tuple(shape))
    if stop - start != info.nbytes:
        raise CheckpointError(
            f"{path.name}: {name!r} is {info}, expected {info.nbytes} bytes, its header gives it "
            f"{stop - start}. ({path})"
        )
    return info, stop


def _require_tiled(path: Place, spans: Iterable[tuple[int, int]]) -> None:
    """CheckpointError for gaps and overlaps between tensors."""
    position = 0
    for start, stop in sorted(spans):
        if start != position:
            what = "overlap" if start < position else "leave a gap"
            raise CheckpointError(f"{path.name} has an invalid header: tensors {what} at byte {start}. ({path})")
        position = stop


def _whole(part: Callable[[int, int], Tensor], info: TensorInfo) -> Tensor:
    return part(0, info.numel).reshape(info.shape)


def _part(stamp: Stamp, dtype: torch.dtype, position: int, start: int, stop: int) -> Tensor:
    """The elements from start to stop of the tensor whose first byte is at `position`.

    A private mapping of only these pages, freed with the tensor, without madvise: a shared one would keep every page
    that was ever read in memory, and changes in memory do not reach the file. For small tensors it takes a tenth of the
    time of safetensors' own reader, which parses the header each time (22 against 200 µs), for large ones as long.

    Measured on parts of 4 MB from 1.7 GB, 1 and 2 threads: at least as fast as positioned reads, with no more CPU time
    (0.5-0.65 s against 0.55-0.7 with a cold cache, 0.3 each with a warm one), and 15 MB of memory per thread against 50
    to 80. MADV_SEQUENTIAL or MADV_WILLNEED cost a quarter more CPU time, were slower with a cold cache, and gained
    nothing with a warm one.
    """
    if stop <= start:
        return torch.empty(0, dtype=dtype)
    first, last = position + start * dtype.itemsize, position + stop * dtype.itemsize
    if isinstance(stamp.path, Remote):
        return torch.frombuffer(_fetched(stamp, stamp.path, first, last), dtype=dtype)
    offset = first % mmap.ALLOCATIONGRANULARITY
    stamp.require_same()
    try:
        with stamp.path.open("rb") as file:
            window = mmap.mmap(file.fileno(), last - first + offset, access=mmap.ACCESS_COPY, offset=first - offset)
    except (OSError, ValueError) as error:  # ValueError: the file is too short
        raise stamp.failed(error) from error
    return torch.frombuffer(window, dtype=dtype, count=stop - start, offset=offset)


def _fetched(stamp: Stamp, path: Remote, first: int, last: int) -> bytearray:
    """Bytes of an object, which is checked for changes after they were read."""
    try:
        data = bytearray(path.read(first, last))
    except OSError as error:
        raise stamp.failed(error) from error
    stamp.require_same()
    if len(data) != last - first:
        raise stamp.failed(f"bytes {first} to {last} came as {len(data)}")
    return data
