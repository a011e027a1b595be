"""The place of an output: whether it can be written there at all, the room on its disk; and taking it away again."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from symfuse.errors import OptionError, OutputError
from symfuse.io.folder import CONFIG
from symfuse.io.messages import some
from symfuse.io.objects import UNFINISHED, remove_objects
from symfuse.io.remote import Place, Remote, entries, place_of


def check_target(
    target: str | os.PathLike[str] | Remote,
    *,
    overwrite: bool | None = False,
    inputs: Sequence[Place] = (),
    resume: bool = False,
    lasting: bool = False,
) -> None:
    """OutputError if `write` could not write there: for callers with long work to do before they write. overwrite: None
    where nothing that is there is ever replaced. resume: OptionError at a URL. lasting: OptionError at a URL of memory
    that only this process sees."""
    place = output_place(target)
    try:
        if isinstance(place, Remote):
            if resume:
                raise OptionError(f"{place}: nothing is kept of what is unfinished at a URL; leave resume out")
            if lasting and place.passing:
                raise OptionError(
                    f"{place} is in the memory of one process, which no other sees, and ends with it; name a folder, "
                    "or a store such as s3://bucket/model"
                )
            _require_apart(place, inputs)
            _require_new(place, overwrite)
        else:
            _check(place, overwrite, inputs)
    except (OSError, ValueError) as error:  # a folder that may not be entered, a NUL
        raise OutputError(f"{place} cannot be written: {error}") from error


def output_place(target: str | os.PathLike[str] | Remote) -> Place:
    """Where an output is to be: the absolute path, links in it kept, which are refused; or the URL."""
    place = place_of(target)
    return place if isinstance(place, Remote) else Path(os.path.abspath(place))  # noqa: PTH100


def write_text(target: Path, text: str, what: str) -> None:
    """As `write_file`, in UTF-8."""
    write_file(target, text.encode(), what)


def write_file(target: Path, data: bytes, what: str) -> None:
    """Write a file in one move, whole or not at all; an older one is replaced. OutputError, with what it is, if that
    is not possible."""
    scratch = target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}")  # of this call: threads may meet
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(data)
        scratch.replace(target)
    except BaseException as error:
        with suppress(OSError):
            scratch.unlink()
        if isinstance(error, OSError):
            raise OutputError(f"{target}: {what} cannot be written there ({error})") from error
        raise


def _check(place: Path, overwrite: bool | None, inputs: Sequence[Place]) -> None:
    parent = existing_parent(place)
    for path in (place, *(parent / name for name in place.relative_to(parent).parts)):
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # fails for a name that is too long, of a folder still to be made too
    _require_apart(place, inputs)
    if place == place.parent:
        raise OutputError(f"{place} is the root of the file system; choose a folder in it")
    if place.is_symlink():
        raise OutputError(f"{place} is a symbolic link; nothing is written through links. Give the folder itself")
    _require_new(place, overwrite)
    if not parent.is_dir():
        raise OutputError(f"{parent} is not a folder, so {place} cannot be created")
    if not _writable(parent):
        raise OutputError(f"{parent} is not writable, so {place} cannot be created")
    if place.exists() and not _writable(place):  # else it could be moved aside, and then not be removed
        raise OutputError(f"{place} is not writable, so it cannot be replaced")


def _require_new(place: Place, overwrite: bool | None) -> None:
    """OutputError if there is something already that is not to be replaced."""
    if not place.exists():
        return
    if not place.is_dir():
        raise OutputError(f"{place} is a file; choose another output")
    if not overwrite:
        way = "" if overwrite is None else ", or replace it (--overwrite; in Python overwrite=True)"
        raise OutputError(f"{place} exists; choose another output{way}")
    if (found := entries(place)) and not any((place / name).exists() for name in (CONFIG, UNFINISHED)):
        raise OutputError(
            f"{place} exists and is not a model folder (it has no {CONFIG}), so it is not overwritten: "
            f"it holds {some(path.name for path in found)}"
        )


def _require_apart(place: Place, inputs: Sequence[Place]) -> None:
    for given in inputs:
        if relation := overlap(place, given):
            raise OutputError(f"the output {place} {relation} the input {given}; choose another output")


def overlap(place: Place, other: Place) -> str:
    """How one folder has to do with another, whatever links and dots lead there: it "is", "lies inside" or "holds" it;
    empty: neither touches the other."""
    if isinstance(place, Remote) != isinstance(other, Remote):
        return ""
    one, two = (f"{_resolved(folder).rstrip('/')}/" for folder in (place, other))
    return "is" if one == two else "lies inside" if one.startswith(two) else "holds" if two.startswith(one) else ""


def _resolved(folder: Place) -> str:
    return folder.resolve().url if isinstance(folder, Remote) else os.path.realpath(folder)  # a loop is left as it is


def remove(place: Place) -> None:
    """Remove a model. OSError if that is not possible."""
    if isinstance(place, Remote):
        remove_objects(place)
    else:
        shutil.rmtree(place)


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def existing_parent(place: Path) -> Path:
    """The nearest folder above that is there; of the root, itself."""
    return next((parent for parent in place.parents if os.path.lexists(parent)), place)


def free_space(place: Path) -> int:
    """Bytes that are free on the disk on which `place` is, or is to be."""
    return shutil.disk_usage(existing_parent(place)).free


def check_space(place: Path, nbytes: int) -> None:
    needed, free = nbytes + nbytes // 100, free_space(place)
    if needed > free:
        raise OutputError(
            f"{place} needs {needed / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB free; "
            "free some space or choose another disk"
        )
