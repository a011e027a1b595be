"""A model as objects in a store, which knows no folders to rename: what makes it a model is put there last."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from symfuse.errors import OutputError
from symfuse.io.partial import system_errors
from symfuse.io.remote import Place, Remote, below

CONFIG = "config.json"  # without it nothing is opened as a model


@contextmanager
def new_objects(place: Remote, files: Mapping[str, bytes], shards: Iterable[str], *, overwrite: bool) -> Iterator[None]:
    """The small files of a model, before and after its shards are put there by the block: config.json at the end.

    What was there is removed first, with `overwrite`, its config.json before all else. Whatever ends the block early,
    what of the model is there is removed. Two runs to one URL do not notice each other.
    """
    new = {*files, *shards}
    try:
        with system_errors(place):
            if overwrite and place.exists():
                _remove(place, None)
            for name, data in files.items():
                if name != CONFIG:
                    (place / name).write_bytes(data)
        yield
        with system_errors(place):
            (place / CONFIG).write_bytes(files[CONFIG])
    except BaseException as error:
        try:
            _remove(place, new)
            left = f"No part of {place} was left behind"
        except OSError as other:
            left = f"What was written of {place} is no model, and could not be removed ({other}); remove it"
        if isinstance(error, OutputError):
            error.args = (f"{error}. {left}",)
        else:
            error.add_note(left)
        raise


def remove(place: Place) -> None:
    """Remove a model. OSError if that is not possible."""
    if isinstance(place, Remote):
        _remove(place, None)
    else:
        shutil.rmtree(place)


def _remove(place: Remote, names: set[str] | None) -> None:
    """Remove what is there of these names, or all."""
    with suppress(FileNotFoundError):
        (place / CONFIG).remove()
    if place.exists():
        for path in list(place.rglob("*")):
            if path.is_file() and (names is None or below(place, path).as_posix() in names):
                path.remove()
