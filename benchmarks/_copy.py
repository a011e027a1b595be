"""What no merge can do without: its inputs read once, in order, and as much as it writes written and synced.

    python _copy.py buffered|direct OUT BYTES INPUTS…

A program of its own with nothing but the standard library, so that its time is that of reading and writing.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

PIECE = 2**23  # bytes


def copy(out: Path, size: int, inputs: Sequence[Path], *, direct: bool) -> None:
    """Read all inputs; write `size` bytes of what was read (rounded up to whole pages), past the cache if `direct`."""
    buffer = memoryview(mmap.mmap(-1, PIECE))  # page-aligned, as direct writes need it
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
    target = os.open(out, flags, 0o666)
    total = sum(path.stat().st_size for path in inputs)
    read = written = 0
    for path in inputs:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                read += count
                while written + PIECE <= size * read // total:  # writing keeps step with reading
                    written += os.write(target, buffer)
    while written < size:
        written += os.write(target, buffer[: -(-min(PIECE, size - written) // mmap.PAGESIZE) * mmap.PAGESIZE])
    os.fsync(target)
    os.close(target)


if __name__ == "__main__":
    copy(Path(sys.argv[2]), int(sys.argv[3]), [Path(p) for p in sys.argv[4:]], direct=sys.argv[1] == "direct")
