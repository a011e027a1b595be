"""Opening a model: a folder, a hub id, a live module or a state dictionary. Quantised weights are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.arguments import checked
from symfuse.errors import CheckpointError, OptionError, masked
from symfuse.io.checkpoint import Checkpoint
from symfuse.io.companions import names_code
from symfuse.io.folder import GGUF, WEIGHT_SUFFIXES, config_in, read_folder, read_json, refuse_stand_ins
from symfuse.io.lazy import Lazy, StoredTensors
from symfuse.io.live import module_config, module_tensors, ties, unwrap, without_prefixes
from symfuse.io.naming import as_family
from symfuse.io.remote import CONFIG, Place, Remote, place_of
from symfuse.io.single import NO_CONFIG, read_file
from symfuse.io.tensors import TensorInfo
from symfuse.messages import some

# Names of tensors that exist only in the packed form of a scheme.
PACKED = {
    "bitsandbytes": re.compile(r"(.*\.)?(SCB|weight\.(absmax|quant_map|nested_absmax|quant_state\..*)|.*\.absmax)"),
    "compressed-tensors": re.compile(r".*\.weight_packed"),
    "HQQ": re.compile(r".*\.W_q"),
    "MXFP4": re.compile(r".*_blocks"),
}
SCALE = re.compile(r".*(weight_scale|weight_scale_inv|\.scale|_scale|\.scales)")
FLOAT8 = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)}
WAY_OUT = "Use the original model, or load it dequantised (in transformers: model.dequantize()) and save that."


@checked
def open(  # noqa: A001 - the verb that users type: symfuse.open
    source: str | os.PathLike[str] | Checkpoint | torch.nn.Module | Mapping[str, Tensor] | Remote,
    *,
    config: Any = None,
    name: str | None = None,
    revision: str | None = None,
    prefer_bin: bool = False,
) -> Checkpoint:
    """A model from a local folder or file, a hub id, a URL that fsspec reads, a live module or a state dictionary.

    A file may be of safetensors, torch.save, Lightning (.ckpt) or GGUF, which is dequantised to float32 in memory.
    A folder or file without config.json can be merged by names and shapes, but not aligned. Models of timm and
    open_clip that a declared family computes are opened as that family, and saved under their own names
    (docs/merging.md). From a URL (s3://bucket/model) only headers are read, and then the byte ranges of the tensors
    that are used. `config`: a mapping or an object with `to_dict()`; needed if the source has none, else used instead
    of its own. `revision` is for hub ids, `prefer_bin` for folders with both safetensors and .bin files. No code of the
    model is imported or run. Raises CheckpointError if the source cannot be read (files absent, damaged or
    inconsistent, quantised weights, an adapter without its base), OptionError for inconsistent arguments.
    """
    own = None if config is None else _config_dict(config)
    if isinstance(source, (str, os.PathLike, Remote)):
        return _open_path(source, own, name, revision, prefer_bin)
    if revision is not None or prefer_bin:
        raise OptionError("revision and prefer_bin are for models in files, not for models in memory")
    if isinstance(source, Checkpoint):
        return source.replace(config=own, name=name)
    if isinstance(source, torch.nn.Module):
        module = unwrap(source)
        own = module_config(module) if own is None else own
        return _in_memory(module_tensors(module), own, name or type(module).__name__)
    return _in_memory(source, own, name or "state dictionary")


def _config_dict(config: Any) -> dict[str, Any]:
    value = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(value, Mapping):
        raise OptionError(f"config must be a mapping or have to_dict(), not {type(config).__name__}")
    return dict(value)


def _open_path(
    source: str | os.PathLike[str] | Remote,
    config: dict[str, Any] | None,
    name: str | None,
    revision: str | None,
    bin_: bool,
) -> Checkpoint:
    folder = place_of(source)
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{str(folder)!r}: the name is not UTF-8; rename the folder") from error
    try:
        if isinstance(folder, Path):
            folder.lstat()
    except FileNotFoundError:
        pass  # perhaps a hub id
    except (OSError, ValueError) as error:  # a name that is too long or has a NUL, a folder without permission
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if revision is not None and (isinstance(folder, Remote) or folder.is_dir()):
        kind = "URL" if isinstance(folder, Remote) else "local folder"
        raise OptionError(f"revision is for hub ids; {folder} is a {kind}")
    if isinstance(folder, Remote) or isinstance(source, Remote):
        _require_folder(folder)
    elif file := _one_file(folder):
        return _open_file(file, config, masked(name or folder.name))
    elif not folder.is_dir():
        folder, name = _from_hub(source, folder, revision, bin_), name or str(source)
    name = masked(name or folder.resolve().name)
    try:
        refuse_stand_ins(folder)
        tensors, notes = read_folder(folder, prefer_bin=bin_)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if config is None:
        own = config_in(folder)
        config, notes = ({}, (*notes, NO_CONFIG)) if own is None else (read_json(own), notes)
    return _checkpoint(tensors, config, name, notes, folder=folder)


def _checkpoint(tensors: Lazy, config: dict[str, Any], name: str, notes: tuple[str, ...], **options: Any) -> Checkpoint:
    """The checkpoint of tensors from files, checked, without wrappers' prefixes in its names."""
    if note := names_code(CONFIG, config):
        notes += (note,)
    _require_families(name, config)
    if isinstance(tensors, StoredTensors):
        stored, more = without_prefixes(name, {key: key for key in tensors})
        tensors, notes = tensors.renamed(stored), notes + more
    refuse_quantised(name, config, tensors.infos)
    return as_family(Checkpoint(tensors, config, name=name, notes=notes, **options))


def _one_file(place: Path) -> Path | None:
    """The single file of a model: this one, or the GGUF file of a folder that has no other weights."""
    if place.is_file():
        return place
    files = [path.name for path in place.iterdir()] if place.is_dir() else []
    weights = [name for name in files if name.endswith((*WEIGHT_SUFFIXES, ".index.json", GGUF))]
    return place / weights[0] if len(weights) == 1 and weights[0].endswith(GGUF) else None


def _open_file(path: Path, config: dict[str, Any] | None, name: str) -> Checkpoint:
    try:
        tensors, own, files, notes = read_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if config is None:
        config, notes = ({}, (*notes, NO_CONFIG)) if own is None else (own, notes)
    return _checkpoint(tensors, config, name, notes, sources=(path,), files=files or {})


def _require_families(name: str, config: Mapping[Any, Any]) -> None:
    """CheckpointError for a model_type, of the model or of a part of it, that is not a text."""
    for key, value in config.items():
        if key == "model_type" and not isinstance(value, str | None):
            raise CheckpointError(f"{name}: config.json has model_type {value!r}, expected a name in quotes")
        if isinstance(value, Mapping):
            _require_families(name, value)


def _require_folder(folder: Place) -> None:
    try:
        exists, file = folder.is_dir(), folder.is_file()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if file:
        raise CheckpointError(f"{folder} is a file; give the folder that holds the weights and {CONFIG}")
    if not exists:
        raise CheckpointError(f"{folder} does not exist; check the URL, and your access")


def _from_hub(source: str | os.PathLike[str], path: Path, revision: str | None, prefer_bin: bool) -> Path:
    """Download a model by its hub id. path: the source as a path, for errors."""
    from symfuse.io.hub import HUB_ID, download

    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link to {path.readlink()}, which does not exist")
    if path.exists():
        raise CheckpointError(f"{path} is neither a file nor a folder; give one that holds weights")
    if not isinstance(source, str) or not HUB_ID.fullmatch(source):
        raise CheckpointError(f"{path} does not exist, and is not the id of a model on the hub (org/name)")
    return download(source, revision=revision, prefer_bin=prefer_bin)


def _in_memory(tensors: Mapping[str, Any], config: dict[str, Any] | None, name: str) -> Checkpoint:
    if config is None:
        raise OptionError(f"{name} has no config of its own: pass config= (a dictionary, or a transformers config)")
    if not tensors:
        raise CheckpointError(f"{name} holds no tensors")
    wrong = [str(key) for key, value in tensors.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if wrong:
        raise CheckpointError(f"{name}: expected tensors by name, found something else under {some(wrong)}")
    absent = [key for key, value in tensors.items() if value.is_meta]
    if absent:
        raise CheckpointError(f"{name}: {some(absent)} on the meta device, without data. Load the weights first.")
    _require_families(name, config)
    names, notes = without_prefixes(name, {key: key for key in tensors})
    renamed = {new: tensors[old] for new, old in names.items()}
    tied = ties(renamed, config)
    if tied:
        notes += (f"left out as ties of earlier tensors: {some(tied)}",)
    untied = {key: value for key, value in renamed.items() if key not in tied}
    refuse_quantised(name, config, {key: TensorInfo.of(value) for key, value in untied.items()})
    return as_family(Checkpoint(untied, config, name=name, notes=notes))


def refuse_quantised(name: str, config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    """Raises CheckpointError, with the scheme, if the config or the names and dtypes of tensors show quantisation."""
    for where in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in ("quantization_config", "compression_config"):
            if where.get(key):
                settings = where[key]
                method = settings.get("quant_method") if isinstance(settings, Mapping) else None
                raise CheckpointError(
                    f"{name} is quantised: its config has a {key} ({method or 'method not named'}). {WAY_OUT}"
                )
    for scheme, tensor in _evidence(infos):
        raise CheckpointError(f"{name} is quantised with {scheme}: found {tensor!r} ({infos[tensor]}). {WAY_OUT}")
    small = [tensor for tensor, info in infos.items() if info.dtype in FLOAT8]
    if small:
        scales = [tensor for tensor in infos if SCALE.fullmatch(tensor)]
        kind = f"with separate scales such as {scales[0]!r}" if scales else "without scales"
        way_out = (
            WAY_OUT if scales else "If the values are the weights themselves, convert them to bfloat16 and save that."
        )
        raise CheckpointError(f"{name} holds 8-bit floats {kind}: {small[0]!r} ({infos[small[0]]}). {way_out}")


def _evidence(infos: Mapping[str, TensorInfo]) -> list[tuple[str, str]]:
    result = [(scheme, tensor) for tensor in infos for scheme, names in PACKED.items() if names.fullmatch(tensor)]
    # MXFP4's blocks are bytes with scales beside them; other modules may be called "…_blocks" too.
    result = [(s, t) for s, t in result if s != "MXFP4" or t.removesuffix("_blocks") + "_scales" in infos]
    for tensor in infos:
        if tensor.endswith(".qweight"):
            result.append((_gptq_or_awq(tensor.removesuffix("qweight"), infos), tensor))
    return result


def _gptq_or_awq(prefix: str, infos: Mapping[str, TensorInfo]) -> str:
    """GPTQ packs a weight's rows (its qweight is as wide as its scales), AWQ its columns."""
    scales, packed = infos.get(prefix + "scales"), infos[prefix + "qweight"]
    if prefix + "g_idx" in infos:
        return "GPTQ"
    if scales is None or len(scales.shape) != 2 or len(packed.shape) != 2:
        return "GPTQ or AWQ"
    return "GPTQ" if scales.shape[1] == packed.shape[1] else "AWQ"
