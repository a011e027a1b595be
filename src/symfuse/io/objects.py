"""A model as objects in a store. A store cannot rename folders, so config.json, which makes it a model, is written
last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from symfuse.errors import OutputError
from symfuse.io.partial import system_errors, together
from symfuse.io.remote import CONFIG, Remote, below

UNFINISHED = ".symfuse-unfinished"  # beside an unfinished upload, or the remains of a killed run


@dataclass(frozen=True)
class Old:
    """The model that will be replaced, if there is one. mark: of its config.json."""

    place: Remote
    mark: tuple[int, str] | None

    @classmethod
    def at(cls, place: Remote) -> Old:
        """The model at this place now."""
        try:
            return cls(place, (place / CONFIG).mark())
        except FileNotFoundError:
            return cls(place, None)

    def is_there(self) -> bool:
        return self.mark is not None and Old.at(self.place) == self

    def retire(self) -> None:
        """Remove its config.json before any object of the new model is written. A late worker finds that of the new
        model, and leaves it."""
        if self.is_there():
            with suppress(FileNotFoundError):  # another worker was faster
                (self.place / CONFIG).remove()


@dataclass
class Upload:
    """An upload. goes_on: whether a worker may still write a part of it."""

    old: Old
    goes_on: bool = False

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """While workers write."""
        self.goes_on = True
        try:
            yield
        finally:
            self.goes_on = False


@contextmanager
def new_objects(
    place: Remote, files: Mapping[str, bytes], shards: Iterable[str], *, overwrite: bool
) -> Iterator[Upload]:
    """Write the small files of a model, config.json last, after the block has written its shards.

    The worker that writes the first shard calls `old.retire()` before. If the block fails before that, the old model is
    unchanged; after that, all objects of both models are removed. A killed run leaves UNFINISHED, which marks its
    remains. Two runs to one URL do not notice each other.
    """
    with together() as outputs, ExitStack() as undo:
        with system_errors(place):
            upload = Upload(Old.at(place))
            before = _names(place) if overwrite and place.exists() else set()
        objects = NewObjects(place, files, upload, before, {UNFINISHED, *files, *shards})
        undo.push(lambda _kind, error, _trace: objects.close(error))
        with system_errors(place):
            (place / UNFINISHED).write_bytes(b"A model that is being written, or was when its run was killed.\n")
        yield upload
        undo.pop_all()
        outputs.insert(0, objects)  # before folders are renamed, which can be undone


@dataclass(frozen=True)
class NewObjects:
    """A model whose shards are in the store. before: the names of the old objects. new: those of this model."""

    place: Remote
    files: Mapping[str, bytes]
    upload: Upload
    before: set[str]
    new: set[str]

    def commit(self, undo: ExitStack) -> None:  # noqa: ARG002 - `close` removes it
        with system_errors(self.place):
            if stale := self.before - self.new:
                remove_objects(self.place, stale)
            for name in sorted(self.files, key=lambda name: name == CONFIG):
                (self.place / name).write_bytes(self.files[name])

    def finish(self) -> None:
        with suppress(OSError):  # the model is complete even if this stays beside it
            (self.place / UNFINISHED).remove()

    def close(self, error: BaseException | None) -> None:
        if error is None:
            return
        left = self._undone()
        if isinstance(error, OutputError):
            error.args = (f"{error}. {left}",)
        else:
            error.add_note(left)

    def _undone(self) -> str:
        """Remove the objects of a run that failed; returns a message about what is left."""
        place = self.place
        try:
            if self.upload.old.is_there():
                remove_objects(place, {UNFINISHED})
                return f"{place} is unchanged"
            remove_objects(place, self.before | self.new)
        except OSError as error:
            return f"The unfinished output at {place} could not be removed ({error}); remove it"
        if self.upload.goes_on:
            return f"An upload to {place} could not be stopped: it is removed when it ends, if this process still runs"
        return f"No part of {place} was left behind"


def remove_objects(place: Remote, names: set[str] | None = None) -> None:
    """Remove the objects with these names, or all: config.json before the rest."""
    present = _names(place)
    for name in sorted(present if names is None else present & names, key=lambda name: name != CONFIG):
        with suppress(FileNotFoundError):
            (place / name).remove()


def _names(place: Remote) -> set[str]:
    """The names of all objects below it."""
    return {below(place, path).as_posix() for path in place.rglob("*") if path.is_file()} if place.exists() else set()
