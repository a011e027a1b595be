"""Planning safetensors shards from dtypes and shapes, and writing tensors into them one at a time."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from symfuse.errors import OptionError, OutputError
from symfuse.io.tensors import DTYPE_NAMES, TensorInfo

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_NAMES)}


def parse_size(size: int | str) -> int:
    """Bytes of "5GB" (decimal), "200MiB" (binary) or a number. Raises OptionError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if not match or match[2].upper() not in UNITS or len(match[1]) > 20:
        raise OptionError(f"max_shard_size {size!r} is not a size; expected bytes, or for example '5GB' or '200MB'")
    value = int(float(match[1]) * UNITS[match[2].upper()])
    if value < 1:
        raise OptionError(f"max_shard_size {size!r} is less than a byte")
    return value


def plan_shards(infos: Mapping[str, TensorInfo], max_shard_size: int) -> dict[str, dict[str, TensorInfo]]:
    """File name → its tensors: in order, each shard as full as the limit allows; a tensor is never split."""
    shards: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + info.nbytes > max_shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = info
        filled += info.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


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


class ShardFile:
    """One safetensors file: its space reserved and its header written at once, its tensors when they come."""

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        self._layout = Layout.of(infos)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _reserve(self._file, self._layout.size)
            _write_at(self._file, 0, memoryview(self._layout.header))
        except BaseException:
            os.close(self._file)
            raise

    def put(self, name: str, tensor: Tensor) -> None:
        _write_at(self._file, self._layout.starts[name], packed_bytes(tensor))

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)


def check_produced(name: str, tensor: Tensor, info: TensorInfo) -> None:
    """Raises OutputError unless a tensor has the dtype and shape that were announced for it."""
    if TensorInfo.of(tensor) != info:
        raise OutputError(f"{name!r} was announced as {info} and came as {TensorInfo.of(tensor)}; nothing was written")


def packed_bytes(tensor: Tensor) -> memoryview:
    """A tensor's values in row-major order, whatever its strides, device or lazy conjugation."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data


def _reserve(file: int, size: int) -> None:
    """Take the disk space now, so that a full disk shows before the work and not after it."""
    try:
        os.posix_fallocate(file, 0, size)
    except (AttributeError, OSError) as error:
        supported = not isinstance(error, AttributeError) and error.errno not in (
            errno.EOPNOTSUPP,
            errno.EINVAL,
        )
        if supported:
            raise
        os.ftruncate(file, size)


def _write_at(file: int, position: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(file, data[: 1 << 30], position)  # the system takes less than 2 GiB at once
        data, position = data[count:], position + count
