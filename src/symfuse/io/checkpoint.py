"""A model as data: its tensors by name, read when asked for, and its config."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.errors import CheckpointError, OptionError
from symfuse.io.folder import read_folder, read_json, refuse_dangling_links
from symfuse.io.live import module_config, module_tensors, unwrap
from symfuse.io.messages import some
from symfuse.io.names import ties, without_prefixes
from symfuse.io.quantised import refuse_quantised
from symfuse.io.tensors import StoredTensors, TensorInfo
from symfuse.io.writer import write

__all__ = ["Checkpoint", "TensorInfo", "is_finite", "open", "scan"]


class Checkpoint(Mapping[str, Tensor]):
    """A model as data: its tensors (read lazily), and its config.

    `infos`, if given, are the dtypes and shapes of all tensors, so that `tensors[name]` may compute; tensors
    that are read from files know their own. `folder` is where tokenizer and other companion files come from,
    `notes` are what the user should be told.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        *,
        name: str,
        folder: Path | None = None,
        infos: Mapping[str, TensorInfo] | None = None,
        notes: tuple[str, ...] = (),
        sources: tuple[Path, ...] = (),
    ) -> None:
        self._tensors = tensors
        self._infos = tensors.infos if infos is None and isinstance(tensors, StoredTensors) else infos
        self.config: Mapping[str, Any] = copy.deepcopy(dict(config))
        self.name = name
        self.folder = folder
        self.notes = notes
        self.sources = tuple(dict.fromkeys(sources if folder is None else (folder, *sources)))

    @property
    def _names(self) -> Mapping[str, Any]:
        return self._tensors if self._infos is None else self._infos

    def __getitem__(self, name: str) -> Tensor:
        """Read, or compute, this tensor only."""
        return self._tensors[name].detach()

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    # Comparing two models tensor by tensor is not what `==` should cost.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Checkpoint({self.name!r}, {len(self)} tensors)"

    def info(self, name: str) -> TensorInfo:
        """The dtype and shape of a tensor; no tensor data is read, unless only the tensor itself can tell."""
        return TensorInfo.of(self._tensors[name]) if self._infos is None else self._infos[name]

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages; the checkpoint's name if it is not in a file."""
        return self._tensors.where(name) if isinstance(self._tensors, StoredTensors) else self.name

    def read(self, name: str) -> Tensor:
        """This tensor for arithmetic: float32 at least, and not yet rounded to `info(name).dtype` if it is computed.

        CheckpointError, naming the model and its file, if it has NaN or infinity.
        """
        wide = getattr(self._tensors, "wide", None)  # of mappings whose tensors are computed
        tensor, where = self[name] if wide is None else wide(name), self.where(name)
        scan(name, tensor, where if where == self.name else f"{self.name}/{where}")
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor

    def to(self, dtype: torch.dtype) -> Checkpoint:
        """The same model with its floating-point tensors in another dtype, cast when they are read."""
        infos = {
            name: TensorInfo(dtype, info.shape) if (info := self.info(name)).dtype.is_floating_point else info
            for name in self
        }
        return self.replace(tensors=_Cast(self, infos), infos=infos)

    def lineage(self) -> dict[str, Any]:
        """What tells this model from others: name, folder, and a sha256 over the header and the first numbers of each
        tensor of its files (over the header alone, where tensors are computed)."""
        digest = hashlib.sha256()
        for name in sorted(self):
            info = self.info(name)
            digest.update(f"{name} {info.dtype} {info.shape}".encode())
            if isinstance(self._tensors, StoredTensors):
                digest.update(self[name].flatten()[:64].double().numpy().tobytes())
        folder = None if self.folder is None else str(self.folder)
        return {"name": self.name, "folder": folder, "sha256": digest.hexdigest()}

    def replace(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        infos: Mapping[str, TensorInfo] | None = None,
        sources: Sequence[Path] = (),
    ) -> Checkpoint:
        """The same model with other tensors, config or name; its folder and notes stay. sources: folders that the
        tensors are read from, beside its own; `save` never writes into any."""
        return Checkpoint(
            self._tensors if tensors is None else tensors,
            self.config if config is None else config,
            name=self.name if name is None else name,
            folder=self.folder,
            infos=self._infos if tensors is None and infos is None else infos,
            notes=self.notes,
            sources=(*self.sources, *sources),
        )

    def save(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
        extra: Mapping[str, bytes | str] | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> Path:
        """Write the model as a folder that `from_pretrained` loads; see `symfuse.io.write`."""
        return write(
            target,
            {name: self.info(name) for name in self},
            self.__getitem__,
            config=self.config,
            copy_from=self.folder,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            extra=extra,
            progress=progress,
            inputs=self.sources,
        )


class _Cast(Mapping[str, Tensor]):
    """The tensors of a checkpoint in the dtypes of `infos`, from their values before rounding."""

    def __init__(self, source: Checkpoint, infos: Mapping[str, TensorInfo]) -> None:
        self.source = source
        self.infos = infos

    def __getitem__(self, name: str) -> Tensor:
        return self.source.read(name).to(self.infos[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def open(  # noqa: A001 - the verb that users type: symfuse.open
    source: str | os.PathLike[str] | Mapping[str, Tensor] | torch.nn.Module,
    *,
    config: Any = None,
    name: str | None = None,
    revision: str | None = None,
    prefer_bin: bool = False,
) -> Checkpoint:
    """A model from a local folder, a hub id, a live module or a state dictionary.

    `config`: a mapping or an object with `to_dict()`; needed where the source has none, else used instead of
    its own. `revision` is for hub ids, `prefer_bin` for folders with both safetensors and .bin files. No code
    of the model is imported or run. Raises CheckpointError if the source cannot be read as it stands (files
    absent, damaged or in disagreement, quantised weights, an adapter without its base), OptionError for
    arguments that make no sense.
    """
    given = None if config is None else _config_dict(config)
    if isinstance(source, (str, os.PathLike)):
        return _open_path(source, given, name, revision, prefer_bin)
    if revision is not None or prefer_bin:
        raise OptionError("revision and prefer_bin are for models in files, not for models in memory")
    if isinstance(source, Checkpoint):
        return source.replace(config=given, name=name)
    if isinstance(source, torch.nn.Module):
        module = unwrap(source)
        given = module_config(module) if given is None else given
        return _in_memory(module_tensors(module), given, name or type(module).__name__)
    if isinstance(source, Mapping):
        return _in_memory(source, given, name or "state dictionary")
    raise OptionError(f"a model is a path, a hub id, a state dictionary or a module, not {type(source).__name__}")


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; integers never do.

    One sum decides almost always: in IEEE arithmetic a sum with a NaN or an infinite term is never finite, so a finite
    sum proves that all terms are. A sum that overflowed proves nothing; then all are looked at.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def scan(name: str, tensor: Tensor, where: str | None = None) -> None:
    """Raise CheckpointError, with the counts, if a tensor that was just read holds NaN or infinity.

    `where` is the file, as `Checkpoint.where` gives it.
    """
    if is_finite(tensor):
        return
    values = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    file = f" of {where}" if where else ""
    raise CheckpointError(
        f"{name!r}{file} holds {nan} NaN and {inf} infinite values among {tensor.numel()}, "
        "expected none. The model was damaged in training or saving; use an earlier checkpoint."
    )


def _config_dict(config: Any) -> dict[str, Any]:
    value = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(value, Mapping):
        raise OptionError(f"config must be a mapping or have to_dict(), not {type(config).__name__}")
    return dict(value)


def _open_path(
    source: str | os.PathLike[str],
    config: dict[str, Any] | None,
    name: str | None,
    revision: str | None,
    bin_: bool,
) -> Checkpoint:
    folder = Path(source)
    try:
        folder.lstat()
    except FileNotFoundError:
        pass  # a hub id, perhaps
    except (OSError, ValueError) as error:  # too long a name, a folder that may not be entered, a NUL
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if folder.is_dir() and revision is not None:
        raise OptionError(f"revision is for hub ids; {folder} is a local folder")
    if not folder.is_dir():
        folder, name = _from_hub(source, revision, bin_), name or str(source)
    name = name or folder.resolve().name
    try:
        refuse_dangling_links(folder)
        tensors, notes = read_folder(folder, prefer_bin=bin_)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if config is None:
        if not (folder / "config.json").exists():
            raise CheckpointError(
                f"{folder} has no config.json. Add it, or pass config= (a dictionary, or a config of transformers)."
            )
        config = read_json(folder / "config.json")
    if "auto_map" in config:
        notes += ("the config names model code (auto_map); it is neither run nor copied, outputs have no auto_map",)
    stored, more = without_prefixes(name, {key: key for key in tensors})
    tensors = tensors.renamed(stored)
    refuse_quantised(name, config, tensors.infos)
    return Checkpoint(tensors, config, name=name, folder=folder, notes=notes + more)


def _from_hub(source: str | os.PathLike[str], revision: str | None, prefer_bin: bool) -> Path:
    from symfuse.io.hub import HUB_ID, download

    path = Path(source)
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link to {path.readlink()}, which is not there")
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds the weights and config.json")
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
    names, notes = without_prefixes(name, {key: key for key in tensors})
    kept = {new: tensors[old] for new, old in names.items()}
    tied = ties(kept, config)
    if tied:
        notes += (f"left out as ties of earlier tensors: {some(tied)}",)
    kept = {key: value for key, value in kept.items() if key not in tied}
    refuse_quantised(name, config, {key: TensorInfo.of(value) for key, value in kept.items()})
    return Checkpoint(kept, config, name=name, notes=notes)
