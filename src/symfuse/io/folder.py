"""The weight files of a model folder, and whether they are complete and consistent."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from symfuse.errors import CheckpointError
from symfuse.files import regular
from symfuse.io.companions import companions
from symfuse.io.lazy import StoredTensor, StoredTensors
from symfuse.io.remote import CONFIG, INDEX, Place, entries
from symfuse.io.safetensors_file import read_safetensors
from symfuse.io.stamp import refuse_pointer, substitute_in
from symfuse.io.torch_file import read_torch_file
from symfuse.messages import some

MOST_NESTED = 50  # levels of a JSON file; copying and writing it takes several recursive calls for each
SHARD = re.compile(r"(?P<stem>.+)-(?P<n>\d+)-of-(?P<m>\d+)(?P<suffix>\.\w+)")
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
GGUF = ".gguf"
WEIGHT_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
DIFFUSERS = "diffusion_pytorch_model"  # the stem of the weight files of diffusers
STEMS = {"_class_name": DIFFUSERS, "model_cfg": "open_clip_model"}  # by a field of the library's config
PIPELINE = "model_index.json"  # of diffusers: it lists the folders of the parts
CONFIGS = (CONFIG, "open_clip_config.json")
# How to convert files of other formats.
CONVERTED_BY = {
    ".h5": "transformers 4: from_pretrained(FOLDER, from_tf=True).save_pretrained(OTHER)",
    ".msgpack": "transformers 4: from_pretrained(FOLDER, from_flax=True).save_pretrained(OTHER)",
    ".distcp": "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt",
    ".nemo": "the script for its architecture in NeMo's scripts/checkpoint_converters",
    ".onnx": "none: take the checkpoint that it was exported from",
}
# Other files that trainers write beside the weights.
NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|adapter_model|alignment).*")

Notes = tuple[str, ...]
Stored = dict[str, StoredTensor]


def read_json(path: Place) -> dict[str, Any]:
    """Read a JSON file that must hold an object. CheckpointError for anything else, such as a pipe."""
    try:
        file = regular(path) if isinstance(path, Path) else path
        value = json.loads(file.read_bytes().decode("utf-8-sig"), object_pairs_hook=_without_repeats)
        _require_shallow(value)
    except (OSError, ValueError, RecursionError) as error:
        what = "" if isinstance(error, OSError) else substitute_in(path)
        seems = f"; it is {what}" if what not in ("", "text") else ""
        raise CheckpointError(f"{path.name} cannot be read as JSON: {error}{seems}. ({path})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds {type(value).__name__}, expected a JSON object. ({path})")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; ValueError if a key occurs twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return out


def _require_shallow(value: Any, depth: int = 0) -> None:
    if depth > MOST_NESTED:
        raise ValueError(f"it is nested more than {MOST_NESTED} levels deep")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_shallow(one, depth + 1)


def config_in(folder: Place) -> Place | None:
    """The config of the model in a folder, if there is one."""
    return next((path for name in CONFIGS if (path := folder / name).exists()), None)


def refuse_stand_ins(folder: Place) -> None:
    """Raises CheckpointError if an entry of the folder is a broken symbolic link, or a companion file is a git-LFS
    pointer."""
    for name in companions(folder) if isinstance(folder, Path) else ():
        refuse_pointer(folder / name)
    for path in entries(folder):
        if isinstance(path, Path) and path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"{path.name} is a symbolic link to {path.readlink()}, which does not exist. "
                f"Complete the download, or remove the link. ({path})"
            )


def read_folder(folder: Place, *, prefer_bin: bool = False) -> tuple[StoredTensors, Notes]:
    """The tensors of a model folder, read on demand, and notes for the user.

    safetensors are preferred to files of torch.save, unless `prefer_bin`. Raises CheckpointError if there are no
    weights, if files are absent or damaged, or if an index and its files disagree.
    """
    files = {path.name: path for path in entries(folder) if path.is_file()}
    safe = [name for name in files if name.endswith(".safetensors") and not NOT_WEIGHTS.match(name)]
    torch = [name for name in files if name.endswith(TORCH_SUFFIXES) and not NOT_WEIGHTS.match(name)]
    safe_stem, torch_stem = _stem(files, "model", ".safetensors"), _stem(files, "pytorch_model", ".bin")
    safe_index, torch_index = f"{safe_stem}{INDEX}", f"{torch_stem}.bin.index.json"
    has_safe, has_torch = bool(safe) or safe_index in files, bool(torch) or torch_index in files
    notes: Notes = ()
    if prefer_bin and not has_torch:
        raise CheckpointError(f"there is no .bin file in {folder}, and prefer_bin asks for one")
    if not has_safe and not has_torch:
        raise _no_weights(folder, files)
    if has_safe and not prefer_bin:
        if has_torch:
            notes = (f"{some(torch or [torch_index])} ignored beside {some(safe or [safe_index])}",)
        stored, more = _read_format(folder, safe, f"{safe_stem}.safetensors", safe_index, _safetensors)
    else:
        if has_safe:
            notes = (f"{some(safe or [safe_index])} ignored, as prefer_bin asks",)
        stored, more = _read_format(folder, torch, f"{torch_stem}.bin", torch_index, read_torch_file)
    if not stored:
        raise CheckpointError(f"the weight files of {folder} hold no tensors")
    return StoredTensors(stored), notes + more


def _stem(files: Mapping[str, Place], usual: str, suffix: str) -> str:
    """The stem of a folder's weight files or their index: the usual one, or that of diffusers."""
    exist = [f"{stem}{suffix}{end}" in files for stem in (usual, DIFFUSERS) for end in ("", ".index.json")]
    return DIFFUSERS if any(exist[2:]) and not any(exist[:2]) else usual


def weight_stem(config: Mapping[str, Any], folder: Place | None) -> str:
    """The stem of an output's weight files, by which the library of its config finds them; for an unknown library, the
    stem in its folder."""
    if stem := next((STEMS[key] for key in STEMS if key in config), None):
        return stem
    if "model_type" in config or not isinstance(folder, Path):
        return "model"
    files = [path.name for path in entries(folder) if path.suffix in WEIGHT_SUFFIXES]
    names = [name for name in files if not NOT_WEIGHTS.match(name)]
    stems = {match["stem"] if (match := SHARD.fullmatch(name)) else name.rpartition(".")[0] for name in names}
    return stems.pop() if len(stems) == 1 and "pytorch_model" not in stems else "model"


def _safetensors(path: Place) -> tuple[Stored, Notes]:
    return read_safetensors(path), ()


def _read_format(
    folder: Place, files: list[str], single: str, index: str, read: Callable[[Place], tuple[Stored, Notes]]
) -> tuple[Stored, Notes]:
    """The tensors of `files`, which are all of one format."""
    has_index = (folder / index).exists()
    if single in files:
        stored, notes = read(folder / single)
        others = ([index] if has_index else []) + [name for name in files if name != single]
        return stored, (*notes, *([f"{some(others)} ignored beside {single}"] if others else []))
    if has_index:
        shards, notes = _read_all(folder, _indexed_files(folder, index), read)
        others = [name for name in files if name not in shards]
        notes += (f"{some(others)} ignored, not named by {index}",) if others else ()
        return _agreeing_with_index(folder, index, shards), notes
    if len(files) == 1 and not SHARD.fullmatch(files[0]):
        stored, notes = read(folder / files[0])
        return stored, (*notes, f"the weights are those of {files[0]}, the only weight file")
    _refuse_incomplete_set(folder, files, index)
    shards, notes = _read_all(folder, files, read)
    merged: Stored = {}
    for name, stored in shards.items():
        if twice := merged.keys() & stored.keys():
            raise CheckpointError(f"{name} repeats tensors of other shards in {folder}: {some(sorted(twice))}")
        merged |= stored
    return merged, (*notes, f"{index} is missing; read the {len(files)} shards that their names declare")


def _read_all(
    folder: Place, names: Iterable[str], read: Callable[[Place], tuple[Stored, Notes]]
) -> tuple[dict[str, Stored], Notes]:
    shards: dict[str, Stored] = {}
    notes: Notes = ()
    for name in names:
        shards[name], more = read(folder / name)
        notes += more
    return shards, notes


def _weight_map(folder: Place, index: str) -> Mapping[str, str]:
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files. ({folder / index})")
    return weight_map


def _indexed_files(folder: Place, index: str) -> list[str]:
    names = list(dict.fromkeys(_weight_map(folder, index).values()))
    outside = [name for name in names if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {some(outside)}. ({folder / index})")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {len(absent)} are absent from {folder}: "
            f"{some(absent, 20)}. Complete the download or copy."
        )
    return names


def _agreeing_with_index(folder: Place, index: str, shards: Mapping[str, Stored]) -> Stored:
    """The tensors in the order of the index, which must list exactly those of the files."""
    weight_map = _weight_map(folder, index)
    holders: dict[str, list[str]] = defaultdict(list)
    for file, stored in shards.items():
        for name in stored:
            holders[name].append(file)
    faults = [f"{name!r} is in no file" for name in weight_map if name not in holders]
    faults += [
        f"{name!r} of {files[0]} is not in the index" for name, files in holders.items() if name not in weight_map
    ]
    faults += [
        f"{name!r} is mapped to {weight_map[name]}, found in {' and '.join(files)}"
        for name, files in holders.items()
        if name in weight_map and files != [weight_map[name]]
    ]
    if faults:
        raise CheckpointError(
            f"{index} and the files of {folder} disagree, as after two saves into one folder: "
            f"{some(faults)}. Save or download the model again into an empty folder."
        )
    return {name: shards[file][name] for name, file in weight_map.items()}


def _refuse_incomplete_set(folder: Place, files: list[str], index: str) -> None:
    matches = [SHARD.fullmatch(name) for name in files]
    declared = [match for match in matches if match]
    if len(declared) < len(files) or len({(m["stem"], m["m"], m["suffix"]) for m in declared}) > 1:
        raise CheckpointError(
            f"{folder} holds several weight files and no {index}: {some(files, 20)}. "
            "Leave one model in the folder, or restore its index."
        )
    total, have = int(declared[0]["m"]), sorted(int(match["n"]) for match in declared)
    absent = sorted(set(range(1, total + 1)) - set(have))
    if absent or len(have) != total:
        first = declared[0]
        width = len(first["n"])
        names = [f"{first['stem']}-{n:0{width}d}-of-{first['m']}{first['suffix']}" for n in absent]
        raise CheckpointError(
            f"{folder} holds {len(have)} of {total} shards; absent: {some(names, 20)}. Complete the download or copy."
        )


def _no_weights(folder: Place, files: Mapping[str, Place]) -> CheckpointError:
    if "adapter_config.json" in files:
        base = read_json(files["adapter_config.json"]).get("base_model_name_or_path")
        return CheckpointError(
            f"{folder} holds an adapter{f' of the model {base!r}' if base else ''}, not a model. As an input of a "
            f"merge write base+adapter: {base or 'BASE'}+{folder}."
        )
    if PIPELINE in files:
        inside = {path.name: entries(path) for path in entries(folder) if path.is_dir()}
        parts = [name for name, one in inside.items() if any(path.name.endswith(WEIGHT_SUFFIXES) for path in one)]
        return CheckpointError(
            f"{folder} is a pipeline of diffusers, of parts that are models of their own: {some(parts)}. Copy one "
            "folder, and merge each part into it, such as: symfuse merge A/unet B/unet -o COPY/unet --overwrite"
        )
    if len(gguf := [name for name in files if name.endswith(GGUF)]) > 1:
        return CheckpointError(f"{folder} holds several GGUF files ({some(gguf)}); give one of them")
    return CheckpointError(
        f"{folder} holds no weights: expected model.safetensors or pytorch_model.bin, or shards of either; "
        f"found {some(files, 10) or 'no files'}. {way_out(files)}"
    )


def way_out(names: Iterable[str]) -> str:
    """How to convert these files; if that is unknown, which formats are read."""
    known = [(name, command) for name in names if (command := CONVERTED_BY.get(Path(name).suffix))]
    if known:
        return f"{some(name for name, _ in known)} is converted by {known[0][1]}."
    return f"Expected a folder, or a file that ends in .safetensors, {', '.join(TORCH_SUFFIXES)} or {GGUF}."
