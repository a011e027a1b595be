"""A model as objects in a store, which knows no folders to rename: what makes it a model is put there last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from symfuse.errors import OutputError
from symfuse.io.partial import system_errors, together
from symfuse.io.remote import CONFIG, Remote, below

UNFINISHED = ".symfuse-unfinished"  # beside what is being put there, or what a killed run has left


@dataclass(frozen=True)
class Old:
    """The model that is to be replaced, if there is one. mark: of its config.json."""

    place: Remote
    mark: tuple[int, str] | None

    @classmethod
    def at(cls, place: Remote) -> Old:
        """What is there now."""
        try:
            return cls(place, (place / CONFIG).mark())
        except FileNotFoundError:
            return cls(place, None)

    def is_there(self) -> bool:
        return self.mark is not None and Old.at(self.place) == self

    def retire(self) -> None:
        """Make it no model any more, before anything of the new one is put there. Who is late finds the new one's
        config.json, and lets it be."""
        if self.is_there():
            with suppress(FileNotFoundError):  # of several workers another was faster
                (self.place / CONFIG).remove()


@dataclass
class Upload:
    """What is being put there. goes_on: whether somebody may still put a part of it there."""

    old: Old
    goes_on: bool = False

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Until nobody writes any more."""
        self.goes_on = True
        try:
            yield
        finally:
            self.goes_on = False


@contextmanager
def new_objects(
    place: Remote, files: Mapping[str, bytes], shards: Iterable[str], *, overwrite: bool
) -> Iterator[Upload]:
    """The small files of a model, after its shards are put there by the block: config.json at the end.

    Who puts the first of them calls `old.retire()` before; if the block ends early, and nobody did, what was there is
    as it was. Else what of the new model and of the old one is there is removed. A killed run leaves UNFINISHED there,
    so that what it has put is known as such. Two runs to one URL do not notice each other.
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
        outputs.insert(0, objects)  # before folders get their names, which can be taken back


@dataclass(frozen=True)
class NewObjects:
    """A model whose shards are in the store. before: the names that were there; new: those of this model."""

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
        with suppress(OSError):  # the model is whole, whether this is beside it or not
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
        """The run has ended early: remove what makes no model, and say what is left."""
        place = self.place
        try:
            if self.upload.old.is_there():
                remove_objects(place, {UNFINISHED})
                return f"{place} is as it was"
            remove_objects(place, self.before | self.new)
        except OSError as error:
            return f"What was written of {place} is no model, and could not be removed ({error}); remove it"
        if self.upload.goes_on:
            return (
                f"An upload to {place} could not be stopped: it is removed when it ends, unless this process ends "
                "before"
            )
        return f"No part of {place} was left behind"


def remove_objects(place: Remote, names: set[str] | None = None) -> None:
    """Remove what is there of these names, or all: config.json before the rest."""
    there = _names(place)
    for name in sorted(there if names is None else there & names, key=lambda name: name != CONFIG):
        with suppress(FileNotFoundError):
            (place / name).remove()


def _names(place: Remote) -> set[str]:
    """All that is there, below it."""
    return {below(place, path).as_posix() for path in place.rglob("*") if path.is_file()} if place.exists() else set()
