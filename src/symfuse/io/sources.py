"""What every verb takes for a model, opened."""

from __future__ import annotations

import os

import torch

from symfuse.errors import OptionError, warn_caller
from symfuse.io.checkpoint import Checkpoint
from symfuse.io.live import module_config, unwrap
from symfuse.io.opening import open as open_checkpoint

# What every verb takes for a model: a folder or hub id, a live module, or an open checkpoint, which is also the way in
# for a state dict: `symfuse.open(state_dict, config=config)`.
Source = str | os.PathLike[str] | Checkpoint | torch.nn.Module


def bare(source: object) -> bool:
    """Whether this is a module that carries no config, and is not declared."""
    return isinstance(source, torch.nn.Module) and module_config(unwrap(source)) is None


def opened(source: Source) -> Checkpoint:
    """OptionError for a module without a config, which says how to give one."""
    if bare(source):
        name = type(source).__name__
        raise OptionError(
            f"{name} has no config of its own, and is not declared: declare it, symfuse.declare(module, "
            "symfuse.suggest(module)), or open it with a config: symfuse.open(module, config={...}), a dictionary such "
            'as {"model_type": "mine"} or a transformers config'
        )
    return source if isinstance(source, Checkpoint) else _with_notes(open_checkpoint(source))


def opened_any(source: Source) -> Checkpoint:
    """Also a module without a config, of which whoever runs it needs none."""
    return open_checkpoint(source, config={}) if bare(source) else opened(source)


def named_as_written(source: Source) -> Checkpoint:
    """A model, folders and hub ids under the names by which they are written, as on the command line."""
    if isinstance(source, str | os.PathLike):
        return _with_notes(open_checkpoint(source, name=os.fspath(source)))
    return opened(source)


def runnable(source: Source) -> Checkpoint | torch.nn.Module:
    return source if isinstance(source, torch.nn.Module) else opened(source)


def _with_notes(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint; what it notes, which the command line prints, is a warning, as nobody else sees it."""
    for note in checkpoint.notes:
        warn_caller(f"{checkpoint.name}: {note}")
    return checkpoint
