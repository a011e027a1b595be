"""The hidden folder in which an output grows: one run at a time, renamed to the target in the end, or removed. All
outputs of a run appear together: they are whole before the first gets its name, or replaces an older one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from symfuse.errors import OutputError
from symfuse.io.remote import Place
from symfuse.signals import deferred

WAYS_OUT = {
    errno.EFBIG: "give a smaller --max-shard-size (in Python max_shard_size), or raise the limit (ulimit -f)",
    errno.EMFILE: "give a larger --max-shard-size (in Python max_shard_size), or raise the limit (ulimit -n)",
}


@runtime_checkable
class NewOutput(Protocol):
    """An output that is whole, but not yet under its name."""

    def commit(self, undo: ExitStack) -> None:
        """Give it its name; `undo` gets what takes each step back."""

    def finish(self) -> None:
        """All outputs have their names: remove what this one replaces."""

    def close(self, error: BaseException | None) -> None:
        """At the end, in any case. error: what prevented the outputs, of which nothing is to stay."""


_outputs: ContextVar[list[NewOutput] | None] = ContextVar("outputs", default=None)


@contextmanager
def together() -> Iterator[list[NewOutput]]:
    """What is written in the block, by whatever function, appears at its end: all of it, or nothing, and then what was
    to be replaced is as it was. Signals wait, but for `interruptible` blocks."""
    if (outer := _outputs.get()) is not None:
        yield outer
        return
    outputs: list[NewOutput] = []
    with deferred(), ExitStack() as closing:
        closing.push(lambda _kind, error, _trace: _close(outputs, error))
        token = _outputs.set(outputs)
        closing.callback(_outputs.reset, token)
        yield outputs
        with ExitStack() as undo:
            for output in outputs:
                output.commit(undo)
            undo.pop_all()
        for output in outputs:
            output.finish()


def _close(outputs: list[NewOutput], error: BaseException | None) -> None:
    for output in outputs:
        output.close(error)


@contextmanager
def system_errors(place: Place) -> Iterator[None]:
    """What the system says of the output, as OutputError, with the way out of the limits that shards run into."""
    try:
        yield
    except OSError as error:
        way = f"; {WAYS_OUT[error.errno]}" if error.errno in WAYS_OUT else ""
        raise OutputError(f"{place} could not be written: {error}{way}") from error


@dataclass
class Partial:
    """A growing output. keep: whether it stays if the run ends early."""

    folder: Path
    keep: bool = False

    @property
    def held(self) -> int:
        """The bytes on the disk that are already taken for it."""
        return sum(path.lstat().st_blocks * 512 for path in self.folder.iterdir()) if self.folder.is_dir() else 0


def partial_of(place: Path, fingerprint: str) -> Partial:
    """Where the output for `place` grows."""
    digest = hashlib.sha256(os.fsencode(place.name) + fingerprint.encode()).hexdigest()
    return Partial(place.with_name(f".{_short(place.name)}.partial-{digest[:8]}"))


def _short(name: str) -> str:
    """A name for hidden files beside one of that name: file systems take 255 bytes, and no two may be mixed up."""
    return name if len(name) <= 50 else f"{name[:41]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"


def _remove_stale(place: Path, keep: Path | None) -> None:
    """Remove what killed runs to the same target left, but for `keep`; what one had moved aside for its output, and was
    killed before that had its name, gets its own again. OutputError if one is still running."""
    for folder in _left(place, "partial"):
        lock, held = _lock(folder)
        try:
            if folder != keep and held:
                shutil.rmtree(folder)
        finally:
            os.close(lock)
    for folder in _left(place, "old"):
        if place.exists():
            shutil.rmtree(folder, ignore_errors=True)  # the run that it is of may be removing it now
        else:
            folder.rename(place)


def _left(place: Path, what: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(_short(place.name))}\.{what}-[0-9a-f]{{8}}")
    return [path for path in place.parent.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Outputs in one folder begin, and get their names, one at a time: of two runs to one target that look at the same
    moment whether another is running, both would go on."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _where_locks_are():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


@contextmanager
def _where_locks_are() -> Iterator[None]:
    """Not all file systems lock, those of networks above all."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _lock(folder: Path) -> tuple[int, bool]:
    """A descriptor that holds the lock of a folder while it is open, and whether it does.

    The lock is on the folder and not on a file in it, so that it is held until the folder has its final name. OSError
    for a link to a folder, whose content is another's.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    held = False
    try:
        with _where_locks_are():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
    except BlockingIOError:
        os.close(file)
        raise OutputError(
            f"another run is writing this output: it holds the lock of {folder}. Wait for it, or choose another output"
        ) from None
    except BaseException:
        os.close(file)
        raise
    return file, held


@contextmanager
def new_folder(
    place: Path, partial: Partial, check: Callable[[], None], room: Callable[[], None], *, resume: bool
) -> Iterator[None]:
    """The partial folder, created (or reused, with `resume`) and locked; renamed to `place` if all goes well, together
    with the other outputs of the run.

    What killed runs to the same target left is removed before, but for the partial folder, with `resume`. check: raises
    if nothing may be written to `place`, at the start or when it gets its name; room: raises if the disk is too small.
    """
    with together() as outputs, ExitStack() as undo:
        folder = NewFolder(place, partial, check)
        undo.push(lambda _kind, error, _trace: folder.close(error))
        folder.start(room, resume=resume)
        yield
        undo.pop_all()
        outputs.append(folder)


class NewFolder:
    """A folder that gets its name when all outputs of a run are whole; one of that name is set aside, then removed."""

    def __init__(self, place: Path, partial: Partial, check: Callable[[], None]) -> None:
        self._place = place
        self._partial = partial
        self._check = check
        self._made = [parent for parent in place.parents if not parent.exists()]
        self._aside = place.with_name(f".{_short(place.name)}.old-{secrets.token_hex(4)}")
        self._lock: int | None = None

    def start(self, room: Callable[[], None], *, resume: bool) -> None:
        """Create the partial folder, and lock it; no other output in that folder starts meanwhile."""
        place, partial = self._place, self._partial
        with system_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            with _alone(place.parent):
                _remove_stale(place, partial.folder if resume else None)
                self._check()
                room()
                partial.keep = partial.folder.is_dir()
                partial.folder.mkdir(exist_ok=resume)
                self._lock = _lock(partial.folder)[0]

    def commit(self, undo: ExitStack) -> None:
        place, partial = self._place, self._partial.folder
        with system_errors(place), _alone(place.parent):
            _sync_folder(partial)
            self._check()  # of what is there by now
            if place.exists():
                place.rename(self._aside)
                undo.callback(self._aside.rename, place)
            partial.rename(place)
            undo.callback(place.rename, partial)
            _sync_folder(place.parent)

    def finish(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)  # the next run tries again

    def close(self, error: BaseException | None) -> None:
        if error is not None:
            if self._lock is not None and not self._partial.keep:
                shutil.rmtree(self._partial.folder, ignore_errors=True)
            for parent in self._made:
                with suppress(OSError):
                    parent.rmdir()
        if self._lock is not None:
            os.close(self._lock)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
