"""What a user names is read if it is a regular file: a pipe would block, and a device may never end."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

_KINDS = {
    stat.S_ISLNK: "a symbolic link",
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def kind(mode: int) -> str:
    """What has this mode, in words; empty for a regular file."""
    return next((what for is_one, what in _KINDS.items() if is_one(mode)), "")


def regular(path: Path) -> Path:
    """The path of a regular file, through links; OSError for anything else, and if nothing is there."""
    if what := kind(path.stat().st_mode):
        raise OSError(errno.EINVAL, f"it is {what}, expected a file", str(path))
    return path
