"""The files beside the weights that an output takes over from its input: an allow-list, never code."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath

from symfuse.errors import CheckpointError
from symfuse.io.content import POINTER, STARTS
from symfuse.io.remote import Place, below, entries

COMPANION = re.compile(
    r"(tokenizer|vocab|chat_template|image_processor)[^/]*\.(json|txt|model|jinja|vocab|tiktoken)"
    r"|merges\.txt|bpe\.codes|special_tokens_map\.json|added_tokens\.json|[^/]+\.model"
    r"|(generation|preprocessor|video_preprocessor)_config\.json|processor_config\.json"
    r"|modules\.json|config_sentence_transformers\.json|sentence_\w+_config\.json"
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_\w+/[^/]+\.json"  # sentence-transformers: 1_Pooling/config.json
    r"|LICEN[CS]E[^/]*(?<!\.py)",
)
TOKENIZER = re.compile(
    r"(tokenizer|vocab)[^/]*|merges\.txt|bpe\.codes|special_tokens_map\.json|added_tokens\.json|[^/]+\.model"
    r"|chat_template[^/]*|additional_chat_templates/.*"
)

# What else a folder that symfuse, transformers or sentence-transformers wrote has: all of it can be written again.
WRITTEN = re.compile(
    r"config\.json|symfuse\.json|README\.md|alignment[^/]*|alignments/[^/]+|\.symfuse-unfinished"
    r"|(model|pytorch_model|diffusion_pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|\d+_\w+/(model\.safetensors|pytorch_model\.bin)"
)


def others_than_model(folder: Place) -> list[str]:
    """The entries of a model folder that are no part of the model: those that no library writes with it."""
    return [path.name for path in entries(folder) if not _is_of_model(folder, path)]


def _is_of_model(folder: Place, path: Place) -> bool:
    if path.is_dir():
        inside = [] if path.is_symlink() else entries(path)
        return bool(inside) and all(_is_of_model(folder, one) for one in inside)
    name = below(folder, path).as_posix()
    return WRITTEN.fullmatch(name) is not None or COMPANION.fullmatch(name) is not None


def companions(folder: Place) -> list[PurePosixPath]:
    """The companion files of a model folder, relative to it."""
    paths = [*entries(folder), *(path for part in entries(folder) if part.is_dir() for path in entries(part))]
    relative = sorted(below(folder, path) for path in paths if path.is_file())
    return [path for path in relative if COMPANION.fullmatch(path.as_posix())]


def read_companions(folder: Place) -> dict[str, bytes]:
    """The companion files by relative name (links are followed), without references to code that stays.

    What they hold is not looked at otherwise, so that a damaged one is carried as it is. CheckpointError if one cannot
    be read.
    """
    try:
        found = {path: (folder / path).read_bytes() for path in companions(folder)}
    except OSError as error:
        raise CheckpointError(f"{folder}: a file beside the weights cannot be read: {error}") from error
    for path, data in found.items():
        if data.startswith(POINTER):
            raise CheckpointError(f"{path} is {STARTS[POINTER]}. ({folder / path})")
    return {path.as_posix(): _without_auto_map(path, data) for path, data in found.items()}


def is_of_tokenizer(name: str) -> bool:
    """Whether a companion file is part of a tokenizer."""
    return TOKENIZER.fullmatch(name) is not None


def _without_auto_map(path: PurePosixPath, data: bytes) -> bytes:
    """A tokenizer's or processor's auto_map names a Python file, which is not copied and would be missed."""
    if path.suffix != ".json" or b'"auto_map"' not in data:
        return data
    try:
        settings = json.loads(data)
        if not isinstance(settings, dict) or settings.pop("auto_map", None) is None:
            return data
        return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    except (ValueError, RecursionError):  # no JSON, or half a surrogate pair in it
        return data
