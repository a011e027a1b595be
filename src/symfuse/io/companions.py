"""The files beside the weights that an output takes over from its input: an allow-list, never code."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from symfuse.errors import CheckpointError
from symfuse.io.folder import read_json

COMPANION = re.compile(
    r"(tokenizer|vocab|chat_template|image_processor)[^/]*\.(json|txt|model|jinja|vocab|tiktoken)"
    r"|merges\.txt|bpe\.codes|special_tokens_map\.json|added_tokens\.json|[^/]+\.model"
    r"|(generation|preprocessor|video_preprocessor)_config\.json|processor_config\.json"
    r"|modules\.json|config_sentence_transformers\.json|sentence_\w+_config\.json"
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_\w+/[^/]+\.json"  # sentence-transformers: 1_Pooling/config.json
    r"|LICEN[CS]E[^/]*(?<!\.py)",
)


def companions(folder: Path) -> list[Path]:
    """The companion files of a model folder, relative to it."""
    paths = [
        *folder.iterdir(),
        *(path for part in folder.iterdir() if part.is_dir() for path in part.iterdir()),
    ]
    relative = sorted(path.relative_to(folder) for path in paths if path.is_file())
    return [path for path in relative if COMPANION.fullmatch(path.as_posix())]


def copy_companions(folder: Path, target: Path) -> None:
    """Copy the companion files' contents (links are followed), without references to code that stays."""
    for path in companions(folder):
        copy = target / path
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / path, copy)
        if path.suffix == ".json":
            _drop_auto_map(copy)


def _drop_auto_map(path: Path) -> None:
    """A tokenizer's or processor's auto_map names a Python file, which is not copied and would be missed."""
    try:
        settings = read_json(path)
    except CheckpointError:  # a list, such as modules.json
        return
    if settings.pop("auto_map", None) is not None:
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
