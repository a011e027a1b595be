"""The hidden folder in which an output grows: one run at a time, renamed to the target in the end, or removed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from symfuse.errors import OutputError


@contextmanager
def system_errors(place: Path) -> Iterator[None]:
    """What the system says of the output, as OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{place} could not be written: {error}") from error


@dataclass
class Partial:
    """A growing output. keep: whether it stays if the run ends early."""

    folder: Path
    keep: bool = False

    @property
    def held(self) -> int:
        """The bytes on the disk that are already taken for it."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.iterdir()) if self.folder.is_dir() else 0


def partial_of(place: Path, fingerprint: str) -> Partial:
    """Where the output for `place` grows."""
    digest = hashlib.sha256(f"{place.name}{fingerprint}".encode()).hexdigest()
    return Partial(place.with_name(f".{_short(place.name)}.partial-{digest[:8]}"))


def _short(name: str) -> str:
    """A name for hidden files beside one of that name: file systems take 255 bytes, and no two may be mixed up."""
    return name if len(name) <= 50 else f"{name[:41]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def remove_stale(place: Path, keep: Path | None) -> None:
    """Remove what killed runs to the same target left, but for `keep`. OutputError if one is still running."""
    pattern = re.compile(rf"\.{re.escape(_short(place.name))}\.partial-[0-9a-f]{{8}}")
    beside = list(place.parent.iterdir()) if place.parent.is_dir() else []
    for folder in [path for path in beside if pattern.fullmatch(path.name) and path.is_dir()]:
        lock, held = _lock(folder)
        try:
            if folder != keep and held:
                shutil.rmtree(folder)
        finally:
            os.close(lock)


def _lock(folder: Path) -> tuple[int, bool]:
    """A descriptor that holds the lock of a folder while it is open, and whether it does: not all file systems lock.

    The lock is on the folder and not on a file in it, so that it is held until the folder has its final name.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise OutputError(
            f"another run is writing this output: it holds the lock of {folder}. Wait for it, or choose another output"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):  # network file systems
            os.close(file)
            raise
        return file, False
    return file, True


@contextmanager
def new_folder(place: Path, partial: Partial, *, resume: bool) -> Iterator[None]:
    """The partial folder, made (or found, with `resume`) and locked; renamed to `place` if all goes well."""
    made = [parent for parent in place.parents if not parent.exists()]
    lock: int | None = None
    try:
        with system_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            partial.folder.mkdir(exist_ok=resume)
            lock = _lock(partial.folder)[0]
            if not os.path.samestat(os.fstat(lock), partial.folder.stat()):
                raise OutputError(f"another run has just written {place}")  # renamed it before it was locked here
        yield
        with system_errors(place):
            _sync_folder(partial.folder)
            aside = place.with_name(f".{_short(place.name)}.old-{secrets.token_hex(4)}")
            _move_into_place(partial.folder, place, aside)
    except BaseException:
        if lock is not None and not partial.keep:
            shutil.rmtree(partial.folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _move_into_place(partial: Path, place: Path, aside: Path) -> None:
    replaced = place.exists()
    if replaced:
        place.rename(aside)
    try:
        partial.rename(place)
    except BaseException:
        if replaced:
            aside.rename(place)
        raise
    _sync_folder(place.parent)
    if replaced:
        shutil.rmtree(aside)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
