"""The place of an output: whether it can be written, and the space on its disk."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from symfuse.errors import OptionError, OutputError, masked
from symfuse.files import kind
from symfuse.io.companions import others_than_model
from symfuse.io.objects import UNFINISHED
from symfuse.io.partial import together
from symfuse.io.remote import CONFIG, Place, Remote, entries, place_of
from symfuse.messages import some


def check_target(
    target: str | os.PathLike[str] | Remote,
    *,
    overwrite: bool | None = False,
    inputs: Sequence[Place] = (),
    resume: bool = False,
    lasting: bool = False,
) -> None:
    """OutputError if `write` could not write there; for callers with long work before they write. overwrite None: for
    verbs that never replace. resume: OptionError for a URL. lasting: OptionError for a URL in the memory of this
    process."""
    place = output_place(target)
    try:
        str(place).encode()
    except UnicodeEncodeError as error:
        raise OutputError(f"{str(place)!r} cannot be written: the name is not UTF-8; choose another output") from error
    try:
        if isinstance(place, Remote):
            if resume:
                raise OptionError(f"{place}: an unfinished output at a URL is not kept; leave resume out")
            if lasting and place.of_process:
                raise OptionError(
                    f"{place} is in the memory of this process, which no other can read, and is lost with it; name a "
                    "folder, or a store such as s3://bucket/model"
                )
            if place.of_web:
                raise OptionError(f"{place}: web servers cannot be written to; name a folder, or a store (s3://…)")
            _require_apart(place, inputs)
            _require_new(place, overwrite)
        else:
            _check_unchanged(place, overwrite, inputs)
    except (OSError, ValueError) as error:  # a folder without permission, a NUL
        raise OutputError(f"{place} cannot be written: {error}") from error


def output_place(target: str | os.PathLike[str] | Remote) -> Place:
    """The place of an output: the URL, or the absolute path with its symbolic links, which are refused later."""
    place = place_of(target)
    return place if isinstance(place, Remote) else Path(os.path.abspath(place))  # noqa: PTH100


def write_text(target: Path, text: str, what: str, mark: str = "") -> None:
    """`write_file` of a text in UTF-8, with credentials of URLs hidden."""
    write_file(target, masked(text).encode(), what, mark.encode())


def write_file(target: Path, data: bytes, what: str, mark: bytes = b"") -> None:
    """Write a file atomically, in a `together` block with the other outputs. An older file that contains the mark is
    replaced. what: the kind of file, for errors. OutputError if `check_file` raises it, or writing fails."""
    assert mark in data, "the file could not be replaced later"
    check_file(target, mark)
    with together() as outputs:
        outputs.append(_NewFile(target, data, what))


def check_file(target: Path, mark: bytes = b"") -> None:
    """OutputError for a target that `write_file` does not replace: a file without the mark, or anything but a regular
    file, such as a device or a link."""
    try:
        if what := kind(target.lstat().st_mode):
            raise OutputError(f"{target} is {what}; choose another name")
        if mark not in target.read_bytes():
            raise OutputError(f"{target} exists, and symfuse did not write it; choose another name, or remove it")
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # a file without permission, a NUL
        raise OutputError(f"{target} cannot be written: {error}") from error


class _NewFile:
    """A file that is written beside its place, and renamed with the other outputs of a `together` block."""

    def __init__(self, target: Path, data: bytes, what: str) -> None:
        self._target, self._what = target, what
        self._scratch = target.with_name(
            f".{target.name[:50]}.{secrets.token_hex(4)}"
        )  # of this call: threads may meet
        with self._explained():
            target.parent.mkdir(parents=True, exist_ok=True)
            self._write(data)

    def commit(self, undo: ExitStack) -> None:
        with self._explained():
            before = self._target.read_bytes() if self._target.exists() else None
            self._scratch.replace(self._target)
        undo.callback(self._restore, before)

    def finish(self) -> None:
        """Nothing to remove: the replaced file is gone."""

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        with suppress(OSError):
            self._scratch.unlink()

    def _write(self, data: bytes) -> None:
        try:
            self._scratch.write_bytes(data)
        except BaseException:
            self.close(None)
            raise

    def _restore(self, before: bytes | None) -> None:
        if before is None:
            self._target.unlink()
        else:
            self._write(before)
            self._scratch.replace(self._target)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"{self._target}: {self._what} cannot be written there ({error})") from error


def _check_unchanged(place: Path, overwrite: bool | None, inputs: Sequence[Place]) -> None:
    """`_check`, again if another run replaced the folder meanwhile."""
    while True:
        before = _state(place)
        try:
            return _check(place, overwrite, inputs)
        except (OSError, OutputError):
            if _state(place) == before:
                raise


def _state(place: Path) -> tuple[int, ...]:
    """Device, inode and time of the last change (also by renaming); empty if nothing is there."""
    with suppress(FileNotFoundError, NotADirectoryError):
        status = place.lstat()
        return status.st_dev, status.st_ino, status.st_ctime_ns
    return ()


def _check(place: Path, overwrite: bool | None, inputs: Sequence[Place]) -> None:
    parent = existing_parent(place)
    for path in (place, *(parent / name for name in place.relative_to(parent).parts)):
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # fails for a name that is too long, also of a folder that does not exist yet
    _require_apart(place, inputs)
    if place == place.parent:
        raise OutputError(f"{place} is the root of the file system; choose a folder in it")
    if place.is_symlink():
        raise OutputError(f"{place} is a symbolic link, through which nothing is written. Name the folder itself")
    _require_apart_from_links(place, inputs)
    _require_new(place, overwrite)
    if not parent.is_dir():
        raise OutputError(f"{parent} is not a folder, so {place} cannot be created")
    if not _writable(parent):
        raise OutputError(f"{parent} is not writable, so {place} cannot be created")
    if place.exists() and not _writable(place):  # it could be moved aside, but not removed
        raise OutputError(f"{place} is not writable, so it cannot be replaced")


def _require_new(place: Place, overwrite: bool | None) -> None:
    """OutputError if something exists there that may not be replaced."""
    if not place.exists():
        return
    if not place.is_dir():
        raise OutputError(f"{place} is a file; choose another output")
    if not overwrite:
        way = "" if overwrite is None else ", or replace it (--overwrite; in Python overwrite=True)"
        raise OutputError(f"{place} exists; choose another output{way}")
    if (inside := entries(place)) and not any((place / name).exists() for name in (CONFIG, UNFINISHED)):
        raise OutputError(
            f"{place} exists and is not a model folder (it has no {CONFIG}), so it is not overwritten: "
            f"it holds {some(path.name for path in inside)}. Choose another output, or remove that folder first"
        )
    if others := others_than_model(place):
        raise OutputError(
            f"{place} is not overwritten, since it also holds files that are not part of a model: {some(others)}. Move "
            "them elsewhere, or choose another output"
        )


def _require_apart(place: Place, inputs: Sequence[Place]) -> None:
    for one in inputs:
        if relation := overlap(place, one):
            raise OutputError(f"the output {place} {relation} the input {one}; choose another output")


def _require_apart_from_links(place: Path, inputs: Sequence[Place]) -> None:
    """OutputError if a link in an input leads to a file in the folder that would be replaced."""
    for one in inputs if place.exists() else ():
        for link in _links(one):
            if overlap(place, Path(os.path.realpath(link))) in ("is", "holds"):
                raise OutputError(
                    f"the output {place} holds a file that the input links to ({link}); choose another output"
                )


def overlap(place: Place, other: Place) -> str:
    """The relation of one folder to another, with links, mounts, dots and letter case resolved: it "is", "lies inside"
    or "holds" it; empty if they are separate."""
    if isinstance(place, Remote) or isinstance(other, Remote):
        return _overlap_of_urls(place, other) if isinstance(place, Remote) and isinstance(other, Remote) else ""
    (one, *above_one), (two, *above_two) = _identities(place), _identities(other)
    inside = two in above_one or not _inside(other).isdisjoint([one, *above_one])
    return "is" if one == two else "lies inside" if inside else "holds" if one in above_two else ""


def _overlap_of_urls(place: Remote, other: Remote) -> str:
    one, two = (f"{folder.resolve().url.rstrip('/')}/" for folder in (place, other))
    return "is" if one == two else "lies inside" if one.startswith(two) else "holds" if two.startswith(one) else ""


Identity = tuple[int, int, tuple[str, ...]]  # device and inode of a folder, and the rest of the path, which is missing


def _identities(path: Path) -> list[Identity]:
    """The identities of a path and of all its parents, the nearest first."""
    real = Path(os.path.realpath(path))  # a loop of links is not resolved
    result = []
    for one in (real, *real.parents):
        existing = next(parent for parent in (one, *one.parents) if os.path.lexists(parent))
        status = existing.lstat()
        result.append((status.st_dev, status.st_ino, one.relative_to(existing).parts))
    return result


def _inside(folder: Path) -> set[Identity]:
    """The identities of the folders below a folder, which may be mounted elsewhere."""
    below = (Path(root, name).lstat() for root, names, _ in os.walk(folder) for name in names)
    return {(status.st_dev, status.st_ino, ()) for status in below}


def _links(folder: Place) -> list[Path]:
    """The entries of a local folder that are links."""
    if isinstance(folder, Remote) or not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_symlink()]


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def existing_parent(place: Path) -> Path:
    """The nearest parent that exists; the root for the root."""
    return next((parent for parent in place.parents if os.path.lexists(parent)), place)


def free_space(place: Path) -> int:
    """The free bytes on the disk of `place`, which need not exist yet."""
    return shutil.disk_usage(existing_parent(place)).free


def check_space(sizes: Mapping[Path, int]) -> None:
    """OutputError if outputs of these sizes do not fit on their disks together."""
    disks = defaultdict(list)
    for place in sizes:
        disks[existing_parent(place).stat().st_dev].append(place)
    for places in disks.values():
        needed, free = sum(sizes[place] + sizes[place] // 100 for place in places), free_space(places[0])
        if needed > free:
            names, verb, its = " and ".join(map(str, places)), *(("need", "their") if places[1:] else ("needs", "its"))
            raise OutputError(
                f"{names} {verb} {needed / 1e6:,.1f} MB and {its} disk has {free / 1e6:,.1f} MB free; "
                "free some space or choose another disk"
            )
