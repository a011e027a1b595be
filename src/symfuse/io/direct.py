"""Writing past the page cache, where the file system supports it.

The output of a merge is not read again soon. In the page cache it would displace the inputs, which are, and cost one
more copy. O_DIRECT needs memory, file offset and length in whole pages. So a block is cast into page-aligned memory, at
the same offset in a page as in the file. Whole pages are written directly, the ends through the cache. No page is
written both ways, so the order of writes does not matter. A direct write waits for the disk, so small blocks are
gathered first.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

PAGE = 4096  # enough for O_DIRECT on every disk in use; some need 512
PIECE = 2**23  # bytes that are cast and written at once
LEAST = 2**16  # bytes; smaller writes are cheaper through the cache
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Buffer:
    """Page-aligned memory that one worker reuses."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE + PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def cast(self, values: Tensor, dtype: torch.dtype, first: int, position: int) -> Tensor:
        """Cast values to `dtype`, at the place of `position` in the file; a write begins at `first` and has at most
        PIECE bytes. Strides, devices and lazy conjugates are resolved by the copy."""
        start = first % PAGE + position - first
        return self._bytes[start : start + values.numel() * dtype.itemsize].view(dtype).copy_(values)

    def placed(self, first: int, position: int) -> memoryview:
        """The bytes that were cast for `first` to `position`; overwritten by the next cast."""
        start = first % PAGE
        return self._view[start : start + position - first]


class DirectFile:
    """A new or existing file to write at positions, from several threads. direct=False: through the page cache only.
    OSError for a symbolic link."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._open = [self._file]
        self._direct: int | None = None
        self._refused = False
        if direct and hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # memory file systems, among others
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
                self._open.append(self._direct)

    def write(self, position: int, data: memoryview) -> None:
        """Write all of `data`. It is written directly only if it comes from a `Buffer`, which aligns it."""
        head = -position % PAGE
        middle = (len(data) - head) // PAGE * PAGE
        if self._direct is None or self._refused or middle < LEAST:
            _write(self._file, position, data)
            return
        if head:
            _write(self._file, position, data[:head])
        stop = head + self._write_pages(self._direct, position + head, data[head : head + middle])
        if stop < len(data):
            _write(self._file, position + stop, data[stop:])

    def _write_pages(self, direct: int, position: int, data: memoryview) -> int:
        """The number of bytes that were written directly: 0 if the file system refuses."""
        try:
            return os.pwrite(direct, data, position)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            self._refused = True
            return 0

    def reserve(self, size: int) -> None:
        """Allocate the disk space now, so that a full disk is noticed before the work."""
        try:
            os.posix_fallocate(self._file, 0, size)
        except (AttributeError, OSError) as error:
            if not isinstance(error, AttributeError) and error.errno not in REFUSED:
                raise
        os.ftruncate(self._file, size)

    def sync(self) -> None:
        """Wait until all written data is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """May be called repeatedly. Descriptors are closed once, since their numbers may be reused."""
        while self._open:
            os.close(self._open.pop())


def _write(file: int, position: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(file, data[: 1 << 30], position)  # the system takes less than 2 GiB at once
        data, position = data[count:], position + count
