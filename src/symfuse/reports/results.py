"""Results that verbs write to a folder for `symfuse report`: FOLDER/KIND.json, written atomically."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from symfuse.errors import OutputError
from symfuse.io.target import check_file, existing_parent, overlap, write_text


def check_result(folder: Path | None, kind: str, models: Sequence[str]) -> None:
    """OutputError, before the work, if `write_result` could not write there. The folder may exist, with other files,
    but not be in one of the input models."""
    if folder is not None:
        _check_place(folder / f"{kind}.json", models, _mark(kind))


def check_draft(file: Path, model: str) -> None:
    """OutputError, before the work, for a file that exists, cannot be written, or would be in the model."""
    if os.path.lexists(file):
        raise OutputError(f"{file} exists; choose another name for the draft (-o), or remove it")
    _check_place(file.absolute(), (model,))


def write_result(data: Mapping[str, Any], folder: Path) -> Path:
    """Write a result atomically, and return its file. An older one is replaced."""
    target = folder / f"{data['kind']}.json"
    write_text(target, json.dumps(data, indent=2) + "\n", "the result", mark=_mark(data["kind"]))
    return target


def _check_place(file: Path, models: Sequence[str], mark: str = "") -> None:
    folder, place = file.parent, file.parent.absolute()
    try:
        for model in filter(os.path.exists, models):
            relation = overlap(place, Path(model))
            if relation in ("is", "lies inside"):
                raise OutputError(
                    f"the folder {folder} for {file.name} {relation} the input {model}, which is never changed; choose "
                    "another place (-o)"
                )
        parent = place if os.path.lexists(place) else existing_parent(place)
        for path in (parent / name for name in place.relative_to(parent).parts):
            with suppress(FileNotFoundError, NotADirectoryError):
                path.lstat()  # fails for a name that is too long
        if not parent.is_dir():
            raise OutputError(f"{parent} is not a folder; choose another place for {file.name} (-o)")
        check_file(file, mark.encode())
        with tempfile.TemporaryFile(dir=parent):
            pass
    except (OSError, ValueError) as error:  # a NUL in the name
        raise OutputError(
            f"{folder}: {file.name} cannot be written there ({error}); choose another place (-o)"
        ) from error


def _mark(kind: str) -> str:
    """The mark of every result of a kind, which few other files contain."""
    return f'"kind": "{kind}"'
