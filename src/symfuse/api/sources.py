"""Options of the verbs, and the words that Python gets where the command line prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symfuse.errors import warn_caller
from symfuse.io.sources import Source, opened
from symfuse.model import Model
from symfuse.recipes import events
from symfuse.recipes.events import Event, Follow

CONFIG = "config.json"


def models_in(folder: str) -> list[str]:
    """The folders of models in a folder that is none itself, by name; else the model that it names."""
    path = Path(folder)
    if not path.is_dir() or (path / CONFIG).exists():
        return [folder]
    inner = sorted(str(one.parent) for one in path.glob(f"*/{CONFIG}"))
    return inner or [folder]


def model_of(source: Source) -> Model:
    return Model.of(opened(source))


def options_set(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None: for the others, the defaults of whoever takes them count."""
    return {name: value for name, value in options.items() if value is not None}


def with_warnings(follow: Follow) -> Follow:
    """Also warns in Python of what the command line prints: differences that matter, and doubts."""
    warned: set[str] = set()

    def warn(event: Event) -> None:
        if isinstance(event, events.Warned | events.Note):
            matters = getattr(event, "about", "merge") == "merge"
            if matters and event.text not in warned:
                warned.add(event.text)
                warn_caller(event.text)
        follow(event)

    return warn
