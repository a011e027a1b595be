"""Whether a file is still the one that was opened: its tensors are read later, and two versions are never mixed."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from symfuse.errors import CheckpointError
from symfuse.io.remote import Place, Remote

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Stamp:
    """A file, its size and its time of change when its header was read; of an object in a store what it says instead.

    It travels with what reads the file, so that another machine that sees another file says so. identity: machine,
    device, inode, and when any of it was last changed, which nobody can set back; only this machine compares it.
    """

    path: Place
    size: int
    changed: int | str
    identity: tuple[str, int, int, int] | None = None

    @classmethod
    def of(cls, path: Place) -> Stamp:
        if isinstance(path, Remote):
            return cls(path, *path.mark())
        stat = path.stat()
        identity = (platform.node(), stat.st_dev, stat.st_ino, stat.st_ctime_ns)
        return cls(path, stat.st_size, stat.st_mtime_ns, identity)

    @property
    def state(self) -> tuple[str, int, int | str, tuple[int, ...]]:
        """What is the same until the file is changed, also after a restart of the machine."""
        return str(self.path), self.size, self.changed, () if self.identity is None else self.identity[2:]

    def require_same(self) -> None:
        """CheckpointError if the file is gone, or was written since."""
        try:
            now = Stamp.of(self.path)
        except FileNotFoundError as error:
            raise self._changed(f"{error} on {platform.node()}") from error
        except OSError as error:
            raise CheckpointError(f"{self.path.name} cannot be read: {error}. ({self.path})") from error
        if now.size != self.size:
            raise self._changed(f"it had {self.size} bytes and has {now.size}")
        if now.changed != self.changed:
            raise self._changed("it was written to")
        if self.identity and now.identity and self.identity[0] == now.identity[0] and self.identity != now.identity:
            other = self.identity[1:3] != now.identity[1:3]
            raise self._changed("another file was put in its place" if other else "its time of change is another")

    def failed(self, error: Exception | str) -> CheckpointError:
        """What to raise of a read that failed: that the file has changed, if it has, or else what went wrong."""
        self.require_same()
        return CheckpointError(f"{self.path.name} cannot be read: {error}. ({self.path})")

    def _changed(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path.name} has changed since it was opened: {why}. Let what writes it end, and run this again. "
            f"({self.path})"
        )


def stamps_of_weights(folders: Iterable[Place]) -> list[Stamp]:
    """Of the weight files in local folders: whoever has read them all asks once more, as pages may be read late."""
    local = [folder for folder in folders if isinstance(folder, Path) and folder.is_dir()]
    files = (path for folder in local for path in folder.iterdir() if path.suffix in WEIGHTS)
    return [Stamp.of(path) for path in files if path.is_file()]
