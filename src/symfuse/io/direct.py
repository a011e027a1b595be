"""Writing past the page cache, where the file system lets us.

What a merge writes is not read again soon: sent through the page cache it would push out the inputs, which are, and be
copied once more. O_DIRECT wants memory, file offset and length in whole pages. So a block is cast into page-aligned
memory, as far into a page there as its bytes lie into a page of the file; whole pages go directly, the ends go through
the cache. Both meet in no page, so the order of writes does not matter. A write waits for the disk, so small blocks are
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

PAGE = 4096  # what O_DIRECT asks for on every disk in use; some take 512
PIECE = 2**23  # bytes that are cast and written at once
LEAST = 2**16  # bytes; what is smaller is cheaper through the cache
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Buffer:
    """Page-aligned memory that one worker uses again and again."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE + PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def cast(self, values: Tensor, dtype: torch.dtype, first: int, position: int) -> Tensor:
        """The values in `dtype`, placed for `position` in a file, among others that are written with them, at most
        PIECE bytes from `first` on. Strides, devices and lazy conjugates are resolved on the way."""
        start = first % PAGE + position - first
        return self._bytes[start : start + values.numel() * dtype.itemsize].view(dtype).copy_(values)

    def placed(self, first: int, position: int) -> memoryview:
        """What was cast for the positions from `first` on; overwritten by what is cast next for others."""
        start = first % PAGE
        return self._view[start : start + position - first]


class DirectFile:
    """A new or existing file to write at positions, from several threads; direct=False: through the page cache only.
    OSError for a link: nothing is written through it."""

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
        """All of `data`, which lies in memory as `Buffer` places it, if it is to be written directly."""
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
        """How many bytes were written directly: fewer than all if the file system refuses, or takes no more."""
        try:
            return os.pwrite(direct, data, position)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            self._refused = True
            return 0

    def reserve(self, size: int) -> None:
        """Take the disk space now, so that a full disk shows before the work and not after it."""
        try:
            os.posix_fallocate(self._file, 0, size)
        except (AttributeError, OSError) as error:
            if not isinstance(error, AttributeError) and error.errno not in REFUSED:
                raise
        os.ftruncate(self._file, size)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Once or more often: the numbers of what is closed may be those of other files by then."""
        while self._open:
            os.close(self._open.pop())


def _write(file: int, position: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(file, data[: 1 << 30], position)  # the system takes less than 2 GiB at once
        data, position = data[count:], position + count
