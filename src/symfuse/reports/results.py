"""Results that verbs leave in a folder for `symfuse report`: FOLDER/KIND.json, whole or not at all."""

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
    """OutputError, before the work, if `write_result` could not write there. The folder may be there, with other files,
    but in none of the models that are read."""
    if folder is not None:
        _check_place(folder / f"{kind}.json", models, _mark(kind))


def check_draft(file: Path, model: str) -> None:
    """OutputError, before the work, for a file that is there, that cannot be written, or that would be in the model."""
    if os.path.lexists(file):
        raise OutputError(f"{file} exists; choose another name for the draft (-o), or remove it")
    _check_place(file.absolute(), (model,))


def write_result(data: Mapping[str, Any], folder: Path) -> Path:
    """Write a result in one move, and return its file. An older one is replaced."""
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
                    f"the folder {folder} for {file.name} {relation} the input {model}, which stays as it is; choose "
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
    """What is in every result of a kind, and in few other files."""
    return f'"kind": "{kind}"'
