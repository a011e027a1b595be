"""Whether an output can be written at all: its place, and the room on its disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from symfuse.errors import OutputError
from symfuse.io.messages import some


def check_target(target: str | os.PathLike[str], *, overwrite: bool = False, inputs: Sequence[Path] = ()) -> None:
    """OutputError if `write` could not write there: for callers with long work to do before they write."""
    place = Path(os.path.abspath(target))  # noqa: PTH100 - keeps symbolic links, which are refused below
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long a name, for example
        raise OutputError(f"{place} cannot be written: {error}") from error
    real = place.resolve()
    for given in inputs:
        read = given.resolve()
        if real == read or read in real.parents or real in read.parents:
            relation = "is" if real == read else "lies inside" if read in real.parents else "holds"
            raise OutputError(f"the output {place} {relation} the input {given}; choose another output")
    if place.is_symlink():
        raise OutputError(f"{place} is a symbolic link; nothing is written through links. Give the folder itself")
    if place.exists() and not place.is_dir():
        raise OutputError(f"{place} is a file; choose another output")
    if place.exists() and not overwrite:
        raise OutputError(f"{place} exists; choose another output, or allow overwriting it")
    if place.exists() and any(place.iterdir()) and not (place / "config.json").exists():
        raise OutputError(
            f"{place} exists and is not a model folder (it has no config.json), so it is not overwritten: "
            f"it holds {some(sorted(path.name for path in place.iterdir()))}"
        )
    parent = _existing_parent(place)
    if not parent.is_dir():
        raise OutputError(f"{parent} is not a folder, so {place} cannot be created")
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise OutputError(f"{parent} is not writable, so {place} cannot be created")


def _existing_parent(place: Path) -> Path:
    return next(parent for parent in place.parents if os.path.lexists(parent))


def check_space(place: Path, nbytes: int) -> None:
    needed, free = nbytes + nbytes // 100, shutil.disk_usage(_existing_parent(place)).free
    if needed > free:
        raise OutputError(
            f"{place} needs {needed / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB free; "
            "free some space or choose another disk"
        )
