"""Folders of sentence-transformers: `modules.json` lists the model itself and the modules behind it, each with a folder
of its own, such as `1_Pooling` and `2_Dense`; those with weights are carried with the model, and not moved."""

from __future__ import annotations

import json
import re
from typing import Any

from safetensors.torch import save

from symfuse.errors import CheckpointError
from symfuse.io.remote import CONFIG, Place, below
from symfuse.io.stamp import WEIGHTS
from symfuse.io.torch_file import read_torch_file
from symfuse.messages import some

MODULES = "modules.json"
FOLDER = re.compile(r"\d+_\w+")
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


def module_weights(folder: Place) -> dict[str, bytes]:
    """The weights of the modules behind the model, by relative name and as safetensors.

    Those of torch.save are read as data only. CheckpointError if a module keeps weights in other files, which would be
    missed.
    """
    result: dict[str, bytes] = {}
    for module in behind(folder):
        files = _weights(module)
        own = {below(module, path).as_posix(): path for path in files}
        if others := [name for name in own if name not in (SAFE, PICKLED)]:
            raise CheckpointError(
                f"{module}: {some(others)} of a module that {MODULES} lists would not be carried; expected are {SAFE} "
                f"and {PICKLED}. Save that module again by sentence-transformers, or take it out of {MODULES}"
            )
        if SAFE in own:
            result[f"{module.name}/{SAFE}"] = own[SAFE].read_bytes()
        elif PICKLED in own:
            tensors = {name: stored.read().contiguous() for name, stored in read_torch_file(own[PICKLED])[0].items()}
            result[f"{module.name}/{SAFE}"] = save(tensors)
    return result


def readers(folder: Place) -> list[str]:
    """The modules that read single units of the hidden states: those with weights, and poolings that take the maximum.
    Other poolings commute with every change of basis."""
    return [module.name for module in behind(folder) if _weights(module) or _takes_maximum(module)]


def behind(folder: Place) -> list[Place]:
    """The folders of the modules behind the model; of a damaged list none."""
    listed = _json(folder / MODULES)
    paths = [str(one.get("path", "")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [folder / path for path in paths if FOLDER.fullmatch(path) and (folder / path).is_dir()]


def _weights(module: Place) -> list[Place]:
    return sorted(path for path in module.rglob("*") if path.suffix in WEIGHTS and path.is_file())


def _takes_maximum(module: Place) -> bool:
    settings = _json(module / CONFIG)
    if not isinstance(settings, dict):
        return False
    return bool(settings.get("pooling_mode_max_tokens")) or "max" in str(settings.get("pooling_mode", ""))


def _json(path: Place) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
