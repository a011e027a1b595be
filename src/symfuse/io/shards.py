"""Planning safetensors shards from dtypes and shapes, and writing tensors into them one at a time."""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from symfuse.errors import OptionError, OutputError
from symfuse.io.direct import PIECE, Buffer, DirectFile
from symfuse.io.partial import system_errors
from symfuse.io.remote import Place
from symfuse.io.tensors import DTYPE_NAMES, TensorInfo, flat_part, is_finite, require_fit

UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
}  # fmt: skip
RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_NAMES)}


def parse_size(size: int | str, what: str = "--max-shard-size (in Python max_shard_size)") -> int:
    """Bytes of "5GB" (decimal), "200MiB" (binary) or a number. Raises OptionError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if not match or match[2].upper() not in UNITS or len(match[1]) > 20:
        raise OptionError(f"{what} {size!r} is not a size; expected bytes, or for example '5GB' or '200MB'")
    value = int(float(match[1]) * UNITS[match[2].upper()])
    if value < 1:
        raise OptionError(f"{what} {size!r} is less than a byte")
    return value


def plan_shards(
    infos: Mapping[str, TensorInfo], max_shard_size: int, stem: str = "model"
) -> dict[str, dict[str, TensorInfo]]:
    """File name → its tensors: in order, each shard as full as the limit allows; a tensor is never split. stem: of the
    file names."""
    shards: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + info.nbytes > max_shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = info
        filled += info.nbytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


@dataclass(frozen=True)
class Layout:
    """The header of one file, and where each tensor's bytes start."""

    header: bytes
    starts: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, infos: Mapping[str, TensorInfo]) -> Layout:
        """Tensors sorted as safetensors does: wide dtypes first, so that each is aligned, then by name."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        position = 0
        for name in sorted(infos, key=lambda name: (-RANK[infos[name].dtype], name)):
            info, starts[name] = infos[name], position
            position += info.nbytes
            entries[name] = {
                "dtype": DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [starts[name], position],
            }
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        return cls(header, {name: len(header) + start for name, start in starts.items()}, len(header) + position)


def new_file(path: Path, layout: Layout, *, direct: bool = True) -> DirectFile:
    """A safetensors file with its space reserved and its header written; if that fails it is closed."""
    file = DirectFile(path, direct=direct)
    try:
        file.reserve(layout.size)
        file.write(0, memoryview(layout.header))
    except BaseException:
        file.close()
        raise
    return file


@runtime_checkable
class Sink(Protocol):
    """A file that bytes are written to at positions."""

    def write(self, position: int, data: memoryview) -> None: ...


class Slot:
    """The range of one tensor in a file, filled with its values block by block, by one worker with one buffer."""

    def __init__(self, file: Sink, name: str, info: TensorInfo, start: int) -> None:
        self._file = file
        self._name = name
        self._info = info
        self._start = start
        self._filled = 0
        self._written = start  # up to this position; later bytes are in the buffer

    def put(self, block: Tensor, buffer: Buffer) -> None:
        """Write the next values, in any floating dtype, or their own if that is not floating. OutputError for too many
        values or another dtype; IncompatibleError if they do not fit in the dtype of the file."""
        dtype = self._info.dtype
        if block.dtype != dtype and not (block.is_floating_point() and dtype.is_floating_point):
            raise self._not_as_announced(f"{block.dtype}{list(block.shape)}".removeprefix("torch."))
        if self._filled + block.numel() > self._info.numel:
            raise self._not_as_announced(f"{self._filled + block.numel()} values or more")
        start, stop = 0, block.numel()
        while start < stop:
            room = PIECE - (self._position - self._written)
            piece = flat_part(block.detach(), start, min(stop, start + room // dtype.itemsize))
            cast = buffer.cast(piece, dtype, self._written, self._position)
            if block.dtype != dtype and not is_finite(cast):
                require_fit(self._name, piece, dtype)
            self._filled += piece.numel()
            start += piece.numel()
            if self._filled == self._info.numel or room - piece.numel() * dtype.itemsize < dtype.itemsize:
                self._file.write(self._written, buffer.placed(self._written, self._position))
                self._written = self._position

    def fill(self, blocks: Iterable[Tensor], buffer: Buffer, place: Place, stop: threading.Event) -> bool:
        """Write all values, in blocks; False if `stop` is set before the end. place: the output, for errors."""
        for block in blocks:
            if stop.is_set():
                return False
            with system_errors(place):
                self.put(block, buffer)
            del block  # before the next one is computed
        self.finish()
        return True

    def finish(self) -> None:
        """OutputError unless all values were written."""
        if self._filled != self._info.numel:
            raise self._not_as_announced(f"{self._filled} values")

    @property
    def _position(self) -> int:
        """The position of the next value."""
        return self._start + self._filled * self._info.dtype.itemsize

    def _not_as_announced(self, found: str) -> OutputError:
        return OutputError(f"{self._name!r} was announced as {self._info} and came as {found}")
