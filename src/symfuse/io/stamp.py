"""Whether a file is still the one that was opened: its tensors are read later, and two versions are never mixed."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from symfuse.errors import CheckpointError
from symfuse.io.remote import Place, Remote


@dataclass(frozen=True)
class Stamp:
    """A file, its size and its time of change when its header was read; of an object in a store what it says instead.

    It travels with what reads the file, so that another machine that sees another file says so.
    """

    path: Place
    size: int
    changed: int | str

    @classmethod
    def of(cls, path: Place) -> Stamp:
        if isinstance(path, Remote):
            return cls(path, *path.mark())
        stat = path.stat()
        return cls(path, stat.st_size, stat.st_mtime_ns)

    def require_same(self) -> None:
        """CheckpointError if the file is gone, or was written since."""
        try:
            now = Stamp.of(self.path)
        except FileNotFoundError as error:
            raise self.error(f"{error} on {platform.node()}") from error
        except OSError as error:
            raise self.error(str(error)) from error
        if now != self:
            sizes = f"it had {self.size} bytes and has {now.size}" if now.size != self.size else "it was written to"
            raise self.error(sizes)

    def error(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path.name} has changed since it was opened: {why}. Let what writes it end, and run this again. "
            f"({self.path})"
        )
