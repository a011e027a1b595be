"""The files beside the weights that are copied from an input to the output: an allow-list, never code.

Folders of sentence-transformers have `modules.json`, which lists the model itself and the modules after it, each with
a folder of its own, such as `1_Pooling` and `2_Dense`. Modules with weights are copied, and not transformed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

from safetensors.torch import save

from symfuse.errors import CheckpointError
from symfuse.io.remote import CONFIG, Place, below, entries
from symfuse.io.stamp import POINTER, STARTS, WEIGHTS
from symfuse.io.torch_file import read_torch_file
from symfuse.messages import some

COMPANION = re.compile(
    r"(tokenizer|vocab|chat_template|image_processor)[^/]*\.(json|txt|model|jinja|vocab|tiktoken)"
    r"|merges\.txt|bpe\.codes|special_tokens_map\.json|added_tokens\.json|[^/]+\.model"
    r"|(generation|preprocessor|video_preprocessor)_config\.json|processor_config\.json"
    r"|modules\.json|config_sentence_transformers\.json|sentence_\w+_config\.json"
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_\w+/[^/]+\.json"  # sentence-transformers: 1_Pooling/config.json
    r"|LICEN[CS]E[^/]*(?<!\.py)"
)
TOKENIZER = re.compile(
    r"(tokenizer|vocab)[^/]*|merges\.txt|bpe\.codes|special_tokens_map\.json|added_tokens\.json|[^/]+\.model"
    r"|chat_template[^/]*|additional_chat_templates/.*"
)

# Further files that symfuse, transformers or sentence-transformers write to a folder: all can be written again.
WRITTEN = re.compile(
    r"(open_clip_)?config\.json|symfuse\.json|alignment[^/]*|alignments/[^/]+|\.symfuse-unfinished"
    r"|(model|pytorch_model|diffusion_pytorch_model|open_clip_(pytorch_)?model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|\d+_\w+/(model\.safetensors|pytorch_model\.bin)"
)

# The model card, the run as data, and its key for the card's digest: an edited card is never overwritten.
CARD, RUN, CARD_DIGEST = "README.md", "symfuse.json", "card_sha256"

SAFETENSORS = re.compile(r"([^/]+?)(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
MODULES = "modules.json"
FOLDER = re.compile(r"\d+_\w+")
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


def others_than_model(folder: Place) -> list[str]:
    """The entries of a model folder that are not part of the model: those that no library writes with it."""
    return [path.name for path in entries(folder) if not _is_of_model(folder, path)]


def _weights_of_one(folder: Place) -> set[str]:
    """The safetensors files of a folder, if all names have the same stem, which may be unusual."""
    stems = {path.name: match[1] for path in entries(folder) if (match := SAFETENSORS.fullmatch(path.name))}
    return set(stems) if len(set(stems.values())) == 1 else set()


def _is_of_model(folder: Place, path: Place) -> bool:
    if path.is_dir():
        inside = [] if path.is_symlink() else entries(path)
        return bool(inside) and all(_is_of_model(folder, one) for one in inside)
    name = below(folder, path).as_posix()
    if name == CARD:
        return _is_as_written(path, folder / RUN)
    return any(one.fullmatch(name) for one in (WRITTEN, COMPANION)) or name in _weights_of_one(folder)


def _is_as_written(card: Place, run: Place) -> bool:
    """Whether symfuse wrote this model card, and nobody changed it since."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return bool(json.loads(run.read_bytes())[CARD_DIGEST] == sha256(card.read_bytes()).hexdigest())
    return False


def companions(folder: Place) -> list[PurePosixPath]:
    """The companion files of a model folder, relative to it."""
    top = entries(folder)
    paths = [*top, *(path for part in top if part.is_dir() for path in entries(part))]
    relative = sorted(below(folder, path) for path in paths if path.is_file())
    return [path for path in relative if COMPANION.fullmatch(path.as_posix())]


def read_companions(folder: Place, *, whole: bool = False) -> dict[str, bytes]:
    """The companion files by relative name (links are followed), without references to code, unless whole.

    Their content is not checked, and copied even if it is damaged. CheckpointError if a file cannot be read.
    """
    try:
        files = {path: (folder / path).read_bytes() for path in companions(folder)}
    except OSError as error:
        raise CheckpointError(f"{folder}: a file beside the weights cannot be read: {error}") from error
    for path, data in files.items():
        if data.startswith(POINTER):
            raise CheckpointError(f"{path} is {STARTS[POINTER]}. ({folder / path})")
    return {path.as_posix(): data if whole else _without_auto_map(path, data) for path, data in files.items()}


def names_code(file: str, settings: Mapping[str, Any]) -> str | None:
    """A note if a config's auto_map names Python files, which transformers runs with trust_remote_code."""
    named = settings.get("auto_map")
    if not named:
        return None
    classes = (
        [entry for one in named.values() for entry in (one if isinstance(one, list) else [one])]
        if isinstance(named, dict)
        else [named]
    )
    files = dict.fromkeys(f"{str(name).rpartition('.')[0]}.py" for name in classes if name is not None)
    return (
        f"{file} names code of its own (auto_map: {some(files)}), which transformers runs only with trust_remote_code; "
        "symfuse never runs or copies it, and outputs have no auto_map"
    )


def code_notes(folder: Place) -> list[str]:
    """`names_code` of each companion file that is a config."""
    result = []
    for path, data in read_companions(folder, whole=True).items():
        settings = _with_auto_map(PurePosixPath(path), data)
        if settings is not None and (note := names_code(path, settings)):
            result.append(note)
    return result


def is_of_tokenizer(name: str) -> bool:
    """Whether a companion file is part of a tokenizer."""
    return TOKENIZER.fullmatch(name) is not None


def _without_auto_map(path: PurePosixPath, data: bytes) -> bytes:
    """The file without auto_map, which names Python files that are not copied."""
    settings = _with_auto_map(path, data)
    try:
        if settings is None or settings.pop("auto_map") is None:
            return data
        return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    except ValueError:  # half a surrogate pair
        return data


def _with_auto_map(path: PurePosixPath, data: bytes) -> dict[str, Any] | None:
    """The object of a JSON file, if it has an auto_map."""
    if path.suffix != ".json" or b'"auto_map"' not in data:
        return None
    try:
        settings = json.loads(data)
    except (ValueError, RecursionError):  # no JSON
        return None
    return settings if isinstance(settings, dict) and "auto_map" in settings else None


def module_weights(folder: Place) -> dict[str, bytes]:
    """The weights of the modules after the model, by relative name and as safetensors.

    Those of torch.save are read as data only. CheckpointError if a module has weights in other files, which would be
    lost.
    """
    result: dict[str, bytes] = {}
    for module in behind(folder):
        files = _weights(module)
        own = {below(module, path).as_posix(): path for path in files}
        if others := [name for name in own if name not in (SAFE, PICKLED)]:
            raise CheckpointError(
                f"{module}: {some(others)} of a module in {MODULES} would not be copied; expected {SAFE} or {PICKLED}. "
                f"Save that module again with sentence-transformers, or remove it from {MODULES}"
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
    """The folders of the modules after the model; none if their list is damaged."""
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
