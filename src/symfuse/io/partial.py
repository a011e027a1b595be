"""The hidden folder in which an output is written: by one run at a time, renamed to the target at the end, or removed.
All outputs of a run appear together: all are complete before the first is renamed or replaces an older one."""

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
    """An output that is complete, but not yet at its place."""

    def commit(self, undo: ExitStack) -> None:
        """Put it at its place; add to `undo` what reverts each step."""

    def finish(self) -> None:
        """Remove what it replaced; called when all outputs are at their places."""

    def close(self, error: BaseException | None) -> None:
        """Called at the end in any case. error: why the outputs failed; then nothing of them may stay."""


_outputs: ContextVar[list[NewOutput] | None] = ContextVar("outputs", default=None)


@contextmanager
def together() -> Iterator[list[NewOutput]]:
    """Outputs that any function writes in the block appear at its end: all or none; if none, nothing was replaced.
    Signals are deferred, except in `interruptible` blocks."""
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
    """Raise OSError as OutputError, with the way out for limits on files."""
    try:
        yield
    except OSError as error:
        way = f"; {WAYS_OUT[error.errno]}" if error.errno in WAYS_OUT else ""
        raise OutputError(f"{place} could not be written: {error}{way}") from error


@dataclass
class Partial:
    """An unfinished output. keep: whether to keep it if the run ends early."""

    folder: Path
    keep: bool = False

    @property
    def held(self) -> int:
        """The bytes that it already occupies on the disk."""
        return sum(path.lstat().st_blocks * 512 for path in self.folder.iterdir()) if self.folder.is_dir() else 0


def partial_of(place: Path, fingerprint: str) -> Partial:
    """The unfinished output for `place`."""
    digest = hashlib.sha256(os.fsencode(place.name) + fingerprint.encode()).hexdigest()
    return Partial(place.with_name(f".{_short(place.name)}.partial-{digest[:8]}"))


def _short(name: str) -> str:
    """A unique short form of a name, for hidden files: file systems allow 255 bytes."""
    return name if len(name) <= 50 else f"{name[:41]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"


def _remove_stale(place: Path, keep: Path | None) -> None:
    """Remove what killed runs to the same target left, except `keep`. An old output that a run had moved aside, before
    it was killed, gets its name back. OutputError if a run is still going on."""
    for folder in _left(place, "partial"):
        lock, held = _lock(folder)
        try:
            if folder != keep and held:
                shutil.rmtree(folder)
        finally:
            os.close(lock)
    for folder in _left(place, "old"):
        if place.exists():
            shutil.rmtree(folder, ignore_errors=True)  # its own run may be removing it now
        else:
            folder.rename(place)


def _left(place: Path, what: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(_short(place.name))}\.{what}-[0-9a-f]{{8}}")
    return [path for path in place.parent.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock under which outputs in one folder start and are renamed one at a time, so that two runs to one target
    do not both find that no other is running."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _where_locks_are():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


@contextmanager
def _where_locks_are() -> Iterator[None]:
    """Ignore that a file system, such as one of a network, has no locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _lock(folder: Path) -> tuple[int, bool]:
    """A descriptor that holds the lock of a folder while it is open, and whether it does.

    The lock is on the folder, not on a file in it, so that it is held until the folder is renamed. OSError for a
    symbolic link.
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
    """Create the partial folder (or reuse it, with `resume`), lock it, and rename it to `place` if all goes well,
    together with the other outputs of the run.

    Remains of killed runs to the same target are removed before, except the partial folder with `resume`. check: raises
    if `place` may not be written, called at the start and before renaming. room: raises if the disk is too small.
    """
    with together() as outputs, ExitStack() as undo:
        folder = NewFolder(place, partial, check)
        undo.push(lambda _kind, error, _trace: folder.close(error))
        folder.start(room, resume=resume)
        yield
        undo.pop_all()
        outputs.append(folder)


class NewFolder:
    """A folder that is renamed when all outputs of a run are complete; an old one is set aside, then removed."""

    def __init__(self, place: Path, partial: Partial, check: Callable[[], None]) -> None:
        self._place = place
        self._partial = partial
        self._check = check
        self._made = [parent for parent in place.parents if not parent.exists()]
        self._aside = place.with_name(f".{_short(place.name)}.old-{secrets.token_hex(4)}")
        self._lock: int | None = None

    def start(self, room: Callable[[], None], *, resume: bool) -> None:
        """Create and lock the partial folder; no other output in the same parent starts meanwhile."""
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
            self._check()  # again, since the place may have changed
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
