"""Files that are not what their names promise (a pointer, a web page, an archive, another format), and files that
changed after they were opened: tensors are read later, and two versions must never be mixed."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from symfuse.errors import CheckpointError, SymfuseError
from symfuse.io.remote import Place, Remote, read_range

POINTER = b"version https://git-lfs.github.com/spec/"
ZIP, PICKLE = b"PK\x03\x04", b"\x80\x02"
HEAD = 200  # bytes that are examined
STARTS = {
    POINTER: "a git-LFS pointer, not the file itself: run `git lfs pull` in its repository, or download the file",
    ZIP: "a zip archive, such as torch.save writes: name it pytorch_model.bin if it is one, or unpack it",
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"GGUF": "a GGUF file: name it so (.gguf)",
    PICKLE: "a pickle, such as torch.save wrote before 1.6: name it pytorch_model.bin",
    b"<": "a web page or XML, perhaps an error that was saved in its place: download the file again",
    b"\0\0\0\0\0\0\0\0": "full of zeros: the download is incomplete; download the file again",
}
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def substitute(head: bytes) -> str:
    """The kind of a file by its first bytes, and the way out; empty if unknown. Never contains the bytes themselves,
    which may be private."""
    if not head:
        return "empty: copy or download the file again"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    result = next((what for start, what in STARTS.items() if head.startswith(start) or text.startswith(start)), "")
    return result or ("text" if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head) else "")


def refuse_pointer(path: Place, error: type[SymfuseError] = CheckpointError) -> None:
    """Raise the error if a file is a git-LFS pointer. A file that cannot be read passes; the reader will raise."""
    with suppress(OSError):
        if path.is_file() and read_range(path, 0, len(POINTER)) == POINTER:  # opening a pipe would block
            raise error(f"{path.name} is {STARTS[POINTER]}. ({path})")


def substitute_in(path: Place, ours: tuple[bytes, ...] = ()) -> str:
    """`substitute` of a file. ours: the first bytes of files of the expected kind."""
    head = read_range(path, 0, HEAD)
    return "" if ours and head.startswith(ours) else substitute(head)


@dataclass(frozen=True)
class Stamp:
    """A file, with its size and modification time when its header was read; for an object, what the store reports.

    It is pickled with the reader, so that another machine that sees another file raises an error. identity: machine,
    device, inode, and time of the last status change, which cannot be set back; compared on this machine only.
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
        """Data that stays equal until the file is changed, even after a restart of the machine."""
        return str(self.path), self.size, self.changed, () if self.identity is None else self.identity[2:]

    def require_same(self) -> None:
        """CheckpointError if the file is missing, or was changed."""
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
        """The error of a failed read: that the file has changed, if so, or else the cause."""
        self.require_same()
        return CheckpointError(f"{self.path.name} cannot be read: {error}. ({self.path})")

    def _changed(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path.name} has changed since it was opened: {why}. Wait until it is complete, and run this again. "
            f"({self.path})"
        )


def stamps_of_weights(folders: Iterable[Place]) -> list[Stamp]:
    """The stamps of the weight files in local folders. They are checked again at the end, since pages may be read
    late."""
    local = [folder for folder in folders if isinstance(folder, Path) and folder.is_dir()]
    files = (path for folder in local for path in folder.iterdir() if path.suffix in WEIGHTS)
    return [Stamp.of(path) for path in files if path.is_file()]
