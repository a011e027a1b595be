"""File systems of tests."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp())
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        if done.returncode != 0:
            pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")
        yield place
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", place], check=True)
        place.rmdir()
