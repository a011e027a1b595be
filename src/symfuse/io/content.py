"""What a file holds in the place of what its name promises: a pointer, a web page, an archive, another format."""

from __future__ import annotations

from contextlib import suppress

from symfuse.errors import CheckpointError, SymfuseError
from symfuse.io.remote import Place, read_range

POINTER = b"version https://git-lfs.github.com/spec/"
ZIP, PICKLE = b"PK\x03\x04", b"\x80\x02"
HEAD = 200  # bytes that are looked at
STARTS = {
    POINTER: "a git-LFS pointer, not the file itself: run `git lfs pull` in its repository, or download the file",
    ZIP: "a zip archive, such as torch.save writes: name it pytorch_model.bin if it is one, or unpack it",
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"GGUF": "a GGUF file: name it so (.gguf)",
    PICKLE: "a pickle, such as torch.save wrote before 1.6: name it pytorch_model.bin",
    b"<": "a web page or XML, perhaps an error that was saved in its place: download the file again",
    b"\0\0\0\0\0\0\0\0": "full of zeros: the download is incomplete; download the file again",
}


def substitute(head: bytes) -> str:
    """What the first bytes of a file say that it is, if it is something else than asked for, and the way out; never the
    bytes themselves, which may be anybody's. Empty: nothing that is known."""
    if not head:
        return "empty: copy or download the file again"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    result = next((what for start, what in STARTS.items() if head.startswith(start) or text.startswith(start)), "")
    return result or ("text" if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head) else "")


def refuse_pointer(path: Place, error: type[SymfuseError] = CheckpointError) -> None:
    """Raise the error if a file is a git-LFS pointer; what cannot be read is left to who reads it."""
    with suppress(OSError):
        if path.is_file() and read_range(path, 0, len(POINTER)) == POINTER:  # to open a pipe waits
            raise error(f"{path.name} is {STARTS[POINTER]}. ({path})")


def substitute_in(path: Place, ours: tuple[bytes, ...] = ()) -> str:
    """As `substitute`, of a file; ours: how files start that are what was asked for."""
    head = read_range(path, 0, HEAD)
    return "" if ours and head.startswith(ours) else substitute(head)
