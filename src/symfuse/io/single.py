"""A model in one file: weights without a config, or a GGUF file, which contains one."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from symfuse.errors import CheckpointError
from symfuse.io.companions import read_companions
from symfuse.io.folder import GGUF, SHARD, TORCH_SUFFIXES, Notes, config_in, read_json, way_out
from symfuse.io.installed import meta_module, quiet
from symfuse.io.lazy import Held, Lazy, StoredTensors
from symfuse.io.remote import CONFIG
from symfuse.io.safetensors_file import read_safetensors
from symfuse.io.stamp import refuse_pointer, substitute_in
from symfuse.io.torch_file import read_torch_file
from symfuse.messages import first_line

NO_CONFIG = f"it has no {CONFIG}: its tensors are known by names and shapes alone"


def read_file(path: Path) -> tuple[Lazy, dict[str, Any] | None, dict[str, bytes] | None, Notes]:
    """The tensors of one file; its config, in it or beside it, if any; its companion files; notes. Tensors of a GGUF
    file are dequantised to float32, in memory; those of other files are read on demand.

    CheckpointError for a shard of a larger model, and for an unsupported format, with what converts it.
    """
    refuse_pointer(path)
    if path.suffix == GGUF:
        return _read_gguf(path)
    if match := SHARD.fullmatch(path.name):
        raise CheckpointError(f"{path.name} is one of {int(match['m'])} shards of a model; give their folder. ({path})")
    if path.suffix != ".safetensors" and path.suffix not in TORCH_SUFFIXES:
        raise CheckpointError(f"{path.name} is not a weight file that symfuse reads. {way_out([path.name])} ({path})")
    stored, notes = (read_safetensors(path), ()) if path.suffix == ".safetensors" else read_torch_file(path)
    if not stored:
        raise CheckpointError(f"{path.name} holds no tensors. ({path})")
    if config := config_in(path.parent):
        return StoredTensors(stored), read_json(config), read_companions(path.parent), notes
    return StoredTensors(stored), None, None, notes


def _read_gguf(path: Path) -> tuple[Lazy, dict[str, Any], dict[str, bytes], Notes]:
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("transformers") is None:
        raise CheckpointError(
            f"{path.name} is a GGUF file, which transformers reads with the package gguf: pip install 'symfuse[gguf]'"
        )
    if seems := substitute_in(path, ours=(b"GGUF",)):
        raise CheckpointError(f"{path.name} is not a GGUF file; it is {seems}. ({path})")
    try:
        with quiet(), redirect_stderr(StringIO()):  # hides a progress bar
            config, tensors = _dequantised(path)
    except Exception as error:  # the two packages raise various errors for unknown bytes and architectures
        raise CheckpointError(f"{path.name}: transformers cannot read this GGUF file: {first_line(error)}") from error
    files, notes = _gguf_tokenizer(path)
    return Held(tensors), config, files, ("dequantised to float32", *notes)


def _dequantised(path: Path) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The config, with its float32 numbers in their shortest form, and all tensors, by their names in memory."""
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    load_gguf_checkpoint: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    config = load_gguf_checkpoint(str(path))["config"] | {"_model_name_or_path": ""}
    config |= {key: float(str(np.float32(value))) for key, value in config.items() if isinstance(value, float)}
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    autos = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    model: Any = next((auto[kind] for auto in autos if kind in auto), None) or transformers.MODEL_MAPPING[kind]
    config["architectures"] = [model.__name__]
    module = meta_module(model, json.dumps(config))
    return config, load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=module)["tensors"]


def _gguf_tokenizer(path: Path) -> tuple[dict[str, bytes], Notes]:
    """The files of the tokenizer in a GGUF file."""
    import transformers

    try:
        with quiet(), tempfile.TemporaryDirectory() as folder:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            tokenizer.save_pretrained(folder)
            return read_companions(Path(folder)), ()
    except Exception as error:  # as above; a model without a tokenizer is still a model
        return {}, (f"transformers cannot read its tokenizer, so there is none: {first_line(error)}",)
