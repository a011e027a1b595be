"""Whether a file is still the one that was opened: its tensors are read later, and two versions are never mixed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from symfuse.errors import CheckpointError


@dataclass(frozen=True)
class Stamp:
    """A file, its size and its time of change when its header was read."""

    path: Path
    size: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        stat = path.stat()
        return cls(path, stat.st_size, stat.st_mtime_ns)

    def require_same(self) -> None:
        """CheckpointError if the file is gone, or was written since."""
        try:
            now = Stamp.of(self.path)
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
