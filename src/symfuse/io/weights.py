"""Writing the weight files of an output: tensor by tensor in threads, or whole files by the workers of an executor.

Both write the same bytes. Threads of one process share open files, so each task is one tensor, and finished tensors can
be kept if a run is interrupted. On other machines, and in stores, which take only whole objects, each task is one file:
a worker writes it under a temporary name and renames it at the end, or uploads it. So no file is ever incomplete, and a
file that is written twice, since a worker was lost, has the same content.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from symfuse.errors import OutputError
from symfuse.executors import Executor, one_torch_thread
from symfuse.io.direct import Buffer, DirectFile
from symfuse.io.objects import Upload
from symfuse.io.partial import Partial, system_errors
from symfuse.io.remote import Place, Remote, RemoteFile
from symfuse.io.shards import Layout, Slot, new_file
from symfuse.io.tensors import TensorInfo

NAME = ".journal"
BATCH = 256 * 10**6  # bytes of tensors between two waits for the disk
Shards = Mapping[str, Mapping[str, TensorInfo]]  # file → its tensors
Blocks = Callable[[str], Iterable[Tensor]]

SCRATCH = ".writing"  # the folder, in that of the output, of incomplete files
ARRIVES = 5.0  # seconds to wait until a file of another machine is visible here


class Journal:
    """A line that identifies the output, then the name of each finished tensor, written once its data is durable.

    folder: of the unfinished output. If it has a journal with the same `fingerprint` and layouts, `done` are its
    tensors in files of the right sizes; otherwise the folder is emptied. Links, and files with several names, are never
    kept, since writing to them could change other data.
    """

    def __init__(self, folder: Path, fingerprint: str, layouts: Mapping[str, Layout]) -> None:
        digest = hashlib.sha256(json.dumps([fingerprint, list(layouts)]).encode())
        for layout in layouts.values():
            digest.update(layout.header)
        self._path = folder / NAME
        self._head = digest.hexdigest()
        sizes = _own_files(folder)
        self.done = self._finished(layouts, sizes)
        kept = {NAME, *layouts} & sizes.keys() if self.done else set()
        for path in folder.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self._pending: dict[str, str] = {}
        self._pending_bytes = 0
        new = folder / f"{NAME}.new"
        self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._append([self._head, *sorted(self.done)])
            new.replace(self._path)
        except BaseException:
            self.close()
            raise

    def _finished(self, layouts: Mapping[str, Layout], sizes: Mapping[str, int]) -> set[str]:
        if NAME not in sizes:
            return set()
        try:
            lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]  # the last line is empty or incomplete
            head, *names = map(json.loads, lines)
            noted = set(names)
        except (OSError, ValueError, TypeError, RecursionError):  # damaged
            return set()
        if head != self._head:
            return set()
        whole = [layout for file, layout in layouts.items() if sizes.get(file) == layout.size]
        return {name for layout in whole for name in layout.starts} & noted

    def add(self, name: str, file: str, nbytes: int, sync: Callable[[str], None]) -> None:
        """Add a finished tensor. sync: waits until the data of a file is durable."""
        self._pending[name] = file
        self._pending_bytes += nbytes
        if self._pending_bytes >= BATCH:
            self.flush(sync)

    def flush(self, sync: Callable[[str], None]) -> None:
        """Write pending names. A failed `sync` is not repeated: the system reports lost data only once."""
        try:
            for file in set(self._pending.values()):
                sync(file)
        except OSError:
            self._pending, self._pending_bytes = {}, 0
            raise
        self._append(self._pending)
        self.done.update(self._pending)
        self._pending, self._pending_bytes = {}, 0

    def _append(self, words: Iterable[str]) -> None:
        data = "".join(json.dumps(word) + "\n" for word in words).encode()
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def remove(self) -> None:
        self._path.unlink()


def _own_files(folder: Path) -> dict[str, int]:
    """The sizes, by name, of the regular files in a folder that have no other hard link."""
    stats = {path.name: path.lstat() for path in folder.iterdir()}
    return {name: one.st_size for name, one in stats.items() if stat.S_ISREG(one.st_mode) and one.st_nlink <= 1}


class Growing(ABC):
    """The weight files of an output, written piece by piece. opened: closed once no worker writes any more. make: makes
    one piece. partial: None in a store. fingerprint: of a run that can be resumed."""

    make: Callable[[str, threading.Event], None]

    def __init__(self, place: Place, partial: Partial | None, shards: Shards, fingerprint: str | None) -> None:
        self.opened = ExitStack()
        self._place = place
        self._partial = partial
        self._shards = shards
        self._layouts = {shard: Layout.of(part) for shard, part in shards.items()}
        self._journal: Journal | None = None
        if partial is not None:
            if fingerprint is not None:
                self._journal = Journal(partial.folder, fingerprint, self._layouts)
                self.opened.callback(self._journal.close)
            partial.keep = bool(self._safe)

    @property
    def names(self) -> Sequence[str]:
        """All tensors."""
        return [name for part in self._shards.values() for name in part]

    @property
    def _safe(self) -> Set[str]:
        """The tensors that the journal has, from an earlier run or this one."""
        return set() if self._journal is None else self._journal.done

    @property
    @abstractmethod
    def done(self) -> Set[str]:
        """The tensors that are finished."""

    @property
    @abstractmethod
    def pieces(self) -> Sequence[str]:
        """The pieces that are not finished."""

    @abstractmethod
    def note(self, piece: str) -> Sequence[str]:
        """Record a finished piece; returns its tensors."""

    def _sync(self, shard: str) -> None:  # noqa: B027 - for workers that do not wait for the disk
        """Wait until the data of a file is on the disk."""

    def _add(self, shard: str, names: Iterable[str]) -> None:
        """Add finished tensors of a file to the journal."""
        if self._journal is not None:
            for name in names:
                self._journal.add(name, shard, self._shards[shard][name].nbytes, self._sync)

    def keep(self) -> None:
        """The run ends early: write the journal, and keep the folder if any tensor is finished."""
        if self._journal is not None and self._partial is not None:
            with suppress(OSError):  # the error that ended the run is raised instead
                self._journal.flush(self._sync)
            self._partial.keep = bool(self._safe)

    def finish(self) -> None:
        """All pieces are finished."""
        if self._journal is not None and self._partial is not None:
            self._journal.remove()
            self._partial.keep = False  # without a journal it cannot be resumed


def fill(output: Growing, executor: Executor, report: Callable[[Iterable[str]], None]) -> None:
    """Make the unfinished pieces. report: called in this thread with the tensors that are finished."""
    report(output.done)
    running = executor.start(output.make, output.pieces)
    with one_torch_thread():
        try:
            for done in running:
                report(output.note(done.item))
        finally:
            if not running.stop():
                running.when_ended(output.opened.pop_all().close)


class _Local(threading.local):
    """The buffer of each worker."""

    def __init__(self) -> None:
        self.buffer = Buffer()


class ByTensor(Growing):
    """Files in a partial folder that are all open. Each tensor is made by one worker, so a very large last tensor keeps
    the other workers waiting."""

    def __init__(
        self, place: Path, partial: Partial, shards: Shards, blocks: Blocks, *, direct: bool, fingerprint: str | None
    ) -> None:
        super().__init__(place, partial, shards, fingerprint)
        self.make = self._make
        self._blocks = blocks
        self._local = _Local()
        self._shard_of = {name: shard for shard, part in shards.items() for name in part}
        self._files: dict[str, DirectFile] = {}
        with self.opened as opened:
            for shard, layout in self._layouts.items():
                self._files[shard] = new_file(partial.folder / shard, layout, direct=direct)
                opened.callback(self._files[shard].close)
            self.opened = opened.pop_all()

    @property
    def done(self) -> Set[str]:
        return self._safe

    @property
    def pieces(self) -> Sequence[str]:
        return [name for name in self._shard_of if name not in self.done]

    def _make(self, piece: str, stop: threading.Event) -> None:
        shard = self._shard_of[piece]
        slot = Slot(self._files[shard], piece, self._shards[shard][piece], self._layouts[shard].starts[piece])
        slot.fill(self._blocks(piece), self._local.buffer, self._place, stop)

    def note(self, piece: str) -> Sequence[str]:
        with system_errors(self._place):
            self._add(self._shard_of[piece], (piece,))
        return (piece,)

    def finish(self) -> None:
        """Wait for the disk."""
        for shard in self._files:
            self._sync(shard)
        super().finish()

    def _sync(self, shard: str) -> None:
        self._files[shard].sync()


class ByShard(Growing):
    """Files that are made whole by one worker each, in a partial folder that all machines share, or in a store (then
    partial is None, and upload is set)."""

    def __init__(
        self,
        place: Place,
        partial: Partial | None,
        shards: Shards,
        blocks: Blocks,
        *,
        direct: bool = True,
        fingerprint: str | None = None,
        upload: Upload | None = None,
    ) -> None:
        super().__init__(place, partial, shards, fingerprint)
        with self.opened as opened:
            if partial is not None:
                (partial.folder / SCRATCH).mkdir()
            if upload is not None:
                opened.enter_context(upload.going_on())
            self.opened = opened.pop_all()
        folder, before = place if partial is None else partial.folder, None if upload is None else upload.old.retire
        self.make = WriteShard(place, folder, shards, blocks, direct, before)

    @property
    def done(self) -> Set[str]:
        return {name for shard in self._shards.keys() - self.pieces for name in self._shards[shard]}

    @property
    def pieces(self) -> Sequence[str]:
        safe = self._safe
        return [shard for shard, part in self._shards.items() if not part.keys() <= safe]

    def note(self, piece: str) -> Sequence[str]:
        with system_errors(self._place):
            if self._partial is not None:
                _require_here(self._partial.folder / piece, self._layouts[piece].size)
            self._add(piece, self._shards[piece])
        return list(self._shards[piece])

    def finish(self) -> None:
        """Remove the folder of incomplete files, so that an abandoned worker can write no more."""
        if self._partial is not None:
            shutil.rmtree(self._partial.folder / SCRATCH)
        super().finish()


@dataclass(frozen=True)
class WriteShard:
    """Writes one weight file in `folder`, in order. place: the output, for errors. before: called before anything is
    written to a store. OutputError if it cannot be written."""

    place: Place
    folder: Place
    shards: Shards
    blocks: Blocks
    direct: bool
    before: Callable[[], None] | None = None

    def __call__(self, shard: str, stop: threading.Event) -> None:
        infos, buffer = self.shards[shard], Buffer()
        layout = Layout.of(infos)
        with system_errors(self.place):
            file = self._new(shard, layout)
        with ExitStack() as undo:
            undo.callback(file.discard)
            for name, start in layout.starts.items():  # in the order of the file
                if not Slot(file, name, infos[name], start).fill(self.blocks(name), buffer, self.place, stop):
                    return
            with system_errors(self.place):
                file.close()
            if not stop.is_set():  # else the run may have cleaned up before this file was complete
                undo.pop_all()

    def _new(self, shard: str, layout: Layout) -> RemoteFile | _Scratch:
        if isinstance(self.folder, Remote):
            return RemoteFile(self.folder / shard, layout.header, self.before)
        if not (self.folder / SCRATCH).is_dir():
            raise OutputError(
                f"{self.place} could not be written on {platform.node()}, which does not see {self.folder}: all "
                "machines must share the folder of the output; or use the URL of an object store"
            )
        return _Scratch(self.folder / shard, layout, direct=self.direct)


class _Scratch:
    """A file with a temporary name until it is closed."""

    def __init__(self, path: Path, layout: Layout, *, direct: bool) -> None:
        self._path = path
        self._own = path.parent / SCRATCH / f"{path.name}.{secrets.token_hex(4)}"
        try:
            self._file = new_file(self._own, layout, direct=direct)
        except BaseException:
            self._own.unlink(missing_ok=True)
            raise

    def write(self, position: int, data: memoryview) -> None:
        self._file.write(position, data)

    def close(self) -> None:
        """Sync the complete file to the disk, and rename it."""
        self._file.sync()
        self._file.close()
        self._own.rename(self._path)

    def discard(self) -> None:
        """Remove the file, unless it was renamed."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._own.unlink()


def _require_here(path: Path, size: int) -> None:
    """OutputError if a file of a worker is not visible here after ARRIVES seconds, as networks may need some time."""
    latest = time.monotonic() + ARRIVES
    while not path.is_file() or path.stat().st_size != size:
        if time.monotonic() > latest:
            raise OutputError(
                f"a worker wrote {path.name}, but it is not visible here in {path.parent}: all machines must share the "
                "folder of the output; or use the URL of an object store"
            )
        time.sleep(0.1)
