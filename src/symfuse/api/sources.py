"""What every verb takes for a model, opened; and the words that Python gets where the command line prints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from symfuse.errors import OptionError, warn_caller
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.live import module_config, unwrap
from symfuse.model import Model
from symfuse.recipes import events
from symfuse.recipes.events import Event, Follow

# What every verb takes for a model: a folder or hub id, a live module, or an open checkpoint, which is also the way in
# for a state dict: `symfuse.open(state_dict, config=config)`.
Source = str | os.PathLike[str] | Checkpoint | torch.nn.Module


CONFIG = "config.json"


def opened(source: Source) -> Checkpoint:
    """OptionError for a module without a config, which says how to give one."""
    if isinstance(source, torch.nn.Module) and module_config(unwrap(source)) is None:
        name = type(source).__name__
        raise OptionError(
            f"{name} has no config of its own, and is not declared: declare it, symfuse.declare(module, "
            "symfuse.suggest(module)), or open it with a config: symfuse.open(module, config={...}), a dictionary such "
            'as {"model_type": "mine"} or a transformers config'
        )
    return source if isinstance(source, Checkpoint) else _with_notes(open_checkpoint(source))


def opened_any(source: Source) -> Checkpoint:
    """Also a module without a config, of which whoever runs it needs none."""
    bare = isinstance(source, torch.nn.Module) and module_config(unwrap(source)) is None
    return open_checkpoint(source, config={}) if bare else opened(source)


def named_as_written(source: Source) -> Checkpoint:
    """A model, folders and hub ids under the names by which they are written, as on the command line."""
    if isinstance(source, str | os.PathLike):
        return _with_notes(open_checkpoint(source, name=os.fspath(source)))
    return opened(source)


def models_in(folder: str) -> list[str]:
    """The folders of models in a folder that is none itself, by name; else the model that it names."""
    path = Path(folder)
    if not path.is_dir() or (path / CONFIG).exists():
        return [folder]
    inner = sorted(str(one.parent) for one in path.glob(f"*/{CONFIG}"))
    return inner or [folder]


def runnable(source: Source) -> Checkpoint | torch.nn.Module:
    return source if isinstance(source, torch.nn.Module) else opened(source)


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


def _with_notes(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint; what it notes, which the command line prints, is a warning, as nobody else sees it."""
    for note in checkpoint.notes:
        warn_caller(f"{checkpoint.name}: {note}")
    return checkpoint
