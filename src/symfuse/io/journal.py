"""Which tensors of an unfinished output are safe on the disk: what a later run need not make again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from symfuse.io.shards import Layout

NAME = ".journal"
BATCH = 256 * 10**6  # bytes of tensors between two waits for the disk


class Journal:
    """A line for what is being made, then the name of each finished tensor; a line is written once its data is durable.

    folder: of the unfinished output. If it has a journal of the same `fingerprint` and layouts, `done` are its tensors
    in files of the right sizes; otherwise the folder is emptied. What is no file of its own (a link, or one of several
    names of a file that may be somebody else's) is never kept, so that nothing is written through it.
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
            lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]  # the last line is empty, or was cut short
            head, *names = map(json.loads, lines)
            noted = set(names)
        except (OSError, ValueError, TypeError, RecursionError):  # damaged
            return set()
        if head != self._head:
            return set()
        whole = [layout for file, layout in layouts.items() if sizes.get(file) == layout.size]
        return {name for layout in whole for name in layout.starts} & noted

    def add(self, name: str, file: str, nbytes: int, sync: Callable[[str], None]) -> None:
        """A tensor is finished; `sync(file)` returns when the data of a file is durable."""
        self._pending[name] = file
        self._pending_bytes += nbytes
        if self._pending_bytes >= BATCH:
            self.flush(sync)

    def flush(self, sync: Callable[[str], None]) -> None:
        """Note what is finished. A `sync` that failed is not tried again: the system reports lost data only once."""
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
    """The sizes, by name, of the regular files in a folder that have no other name, there or elsewhere."""
    stats = {path.name: path.lstat() for path in folder.iterdir()}
    return {name: found.st_size for name, found in stats.items() if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1}
