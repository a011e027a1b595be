"""A model as data: its tensors by name, read when asked for, and its config."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.arguments import checked
from symfuse.device import CPU, require
from symfuse.errors import CheckpointError, OptionError, OutputError
from symfuse.executors import Executor
from symfuse.io.companions import read_companions
from symfuse.io.folder import weight_stem
from symfuse.io.hub import require_upload, upload
from symfuse.io.remote import Place, Remote, entries
from symfuse.io.sentence import behind, module_weights, readers
from symfuse.io.stamp import Stamp
from symfuse.io.target import output_place
from symfuse.io.tensors import StoredTensors, TensorInfo, flat_part, is_finite
from symfuse.io.writer import write
from symfuse.messages import shown

__all__ = ["Checkpoint", "TensorInfo", "is_finite", "is_other", "scan"]


# What the sha256 of a lineage is over, beside names, dtypes and shapes.
SAMPLED = "the first, middle and last 64 numbers of each tensor"
NAMED = "the name, as its numbers are computed"


class Checkpoint(Mapping[str, Tensor]):
    """A model as data: its tensors (read lazily), and its config.

    `infos`, if given, are the dtypes and shapes of all tensors, so that `tensors[name]` may compute; tensors
    that are read from files know their own. `folder` is where tokenizer and other companion files come from, unless
    `files` are given in their place; `notes` are messages for the user. `device`: see `on`. `before_save`:
    functions that `save` applies in order before it writes anything; each returns the checkpoint, with another config
    or other files if need be, or raises.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        *,
        name: str,
        folder: Place | None = None,
        infos: Mapping[str, TensorInfo] | None = None,
        notes: tuple[str, ...] = (),
        sources: tuple[Place, ...] = (),
        files: Mapping[str, bytes] | None = None,
        device: str = CPU,
        before_save: tuple[Callable[[Checkpoint], Checkpoint], ...] = (),
    ) -> None:
        self._tensors = tensors
        self._infos = tensors.infos if infos is None and isinstance(tensors, StoredTensors) else infos
        self.config: Mapping[str, Any] = copy.deepcopy(dict(config))
        self.name = name
        self.folder = folder
        self.notes = notes
        self.files = files
        self.device = device
        self.before_save = before_save
        self.sources = tuple(dict.fromkeys(sources if folder is None else (folder, *sources)))
        self._last = threading.local()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What holds, or computes, the tensors."""
        return self._tensors

    @property
    def _names(self) -> Mapping[str, Any]:
        return self._tensors if self._infos is None else self._infos

    def __getitem__(self, name: str) -> Tensor:
        """Read, or compute, this tensor only."""
        return self._there(self._tensors[name].detach())

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    # Comparing two models tensor by tensor is not what `==` should cost.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    __repr__, _repr_html_ = shown(lambda self: {"name": repr(self.name), "tensors": len(self)})

    def info(self, name: str) -> TensorInfo:
        """The dtype and shape of a tensor; no tensor data is read, unless only the tensor itself can tell."""
        return TensorInfo.of(self._tensors[name]) if self._infos is None else self._infos[name]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.info(name).nbytes for name in self)

    def file_of(self, name: str) -> str | None:
        """The file that holds a tensor as it is; None if it is computed, or in memory."""
        where = getattr(self._tensors, "where", None)
        found: str | None = None if where is None else where(name)
        return found

    def where(self, name: str) -> str:
        """`file_of`, or else the checkpoint's name: for messages."""
        return self.file_of(name) or self.name

    def read(self, name: str) -> Tensor:
        """This tensor for arithmetic: float32 at least, and not yet rounded to `info(name).dtype` if it is computed.

        CheckpointError, naming the model and its file, if it has NaN or infinity.
        """
        tensor = self.scanned(name)
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor

    def scanned(self, name: str) -> Tensor:
        """As `read`, in the dtype in which it comes."""
        tensor, file = self.unrounded(name), self.file_of(name)
        scan(name, tensor, self.name if file is None else f"{self.name}/{file}")
        return tensor

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """The elements from start to stop of a tensor as flat: in its stored dtype, read without the rest where the
        file allows it; unrounded if it is computed, as a whole that each thread keeps until it asks for another."""
        part = getattr(self._tensors, "part", None)
        found: Tensor = flat_part(self._whole(name), start, stop) if part is None else part(name, start, stop)
        return self._there(found.detach())

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor in blocks whose elements, flat and one after the other, are its own: unrounded if it is computed,
        and in one block unless its mapping has `blocks(name)`."""
        blocks = getattr(self._tensors, "blocks", None)
        if blocks is not None:
            yield from (self._there(block) for block in blocks(name))
        else:
            yield self.unrounded(name)

    def unrounded(self, name: str) -> Tensor:
        """As `scanned`, for who finds NaN and infinity in what is made of it."""
        wide = getattr(self._tensors, "wide", None)  # of mappings whose tensors are computed
        return self[name] if wide is None else self._there(wide(name))

    def _there(self, tensor: Tensor) -> Tensor:
        """On the device; a tensor that is a shape alone has no data to bring there."""
        return tensor if tensor.is_meta else tensor.to(self.device)

    def _whole(self, name: str) -> Tensor:
        """`unrounded`, but computed once for all parts of it that a thread asks for, one after the other."""
        if isinstance(self._tensors, dict):
            held: Tensor = self._tensors[name]
            return held
        if getattr(self._last, "name", None) != name:
            self._last.name = self._last.tensor = None  # gone before the next is computed
            self._last.tensor = self.unrounded(name)
            self._last.name = name
        tensor: Tensor = self._last.tensor
        return tensor

    def to(self, dtype: torch.dtype) -> Checkpoint:
        """The same model with its floating-point tensors in another dtype, cast when they are read."""
        infos = {
            name: TensorInfo(dtype, info.shape) if (info := self.info(name)).dtype.is_floating_point else info
            for name in self
        }
        return self.replace(tensors=_Cast(self, infos), infos=infos)

    def on(self, device: str) -> Checkpoint:
        """The same model, read to a device, such as "cuda": each tensor is taken there, in its stored dtype, when it is
        asked for. What is made of this checkpoint comes there too, unless it says otherwise. OptionError if there is no
        such device."""
        return self.replace(device=require(device))

    def lineage(self, *, compute: bool = False) -> dict[str, Any]:
        """What tells this model from others: name, folder, and a sha256 over names, dtypes, shapes, some numbers of
        each tensor, and adapters as a whole; of a model that is computed (aligned, merged) its name for the numbers,
        or with `compute` its numbers too: the sha256 is then that of the model when it is saved. "sha256 of" says which
        numbers: two models that differ in others alone have the same.
        """
        computed = hasattr(self._tensors, "wide") and not compute
        digest = hashlib.sha256(self.name.encode() if computed else b"")
        here = self.on(CPU)
        for name in sorted(self):
            info = self.info(name)
            digest.update(f"{name} {info.dtype} {info.shape}".encode())
            if not computed:
                for start, stop in _samples(math.prod(info.shape)):
                    numbers = here.part(name, start, stop)  # a computed one is rounded as it is saved
                    digest.update(numbers.to(info.dtype).double().numpy().tobytes())
        local = [folder for folder in self.sources if isinstance(folder, Path)]  # as adapters are
        for path in sorted(path for folder in local for path in folder.glob("adapter_*")):
            digest.update(path.read_bytes())
        folder = None if self.folder is None else str(self.folder)
        of = NAMED if computed else SAMPLED
        return {"name": self.name, "folder": folder, "sha256": digest.hexdigest(), "sha256 of": of}

    def state(self) -> list[tuple[str, int, int | str, tuple[int, ...]]]:
        """Name, size, times of change and inode of every file that the model is read from: equal if none was written
        since. CheckpointError if one is gone."""
        try:
            files = [path for folder in self.sources for path in entries(folder) if path.is_file()]
            return [Stamp.of(path).state for path in files]
        except OSError as error:
            raise CheckpointError(f"{self.name} has changed since it was opened: {error}") from error

    def replace(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        infos: Mapping[str, TensorInfo] | None = None,
        sources: Sequence[Place] = (),
        files: Mapping[str, bytes] | None = None,
        device: str | None = None,
        before_save: tuple[Callable[[Checkpoint], Checkpoint], ...] | None = None,
        notes: tuple[str, ...] | None = None,
    ) -> Checkpoint:
        """The same model with other tensors, config, name, device or notes; its folder stays. sources: folders that
        the tensors are read from, beside its own; `save` never writes into any."""
        return Checkpoint(
            self._tensors if tensors is None else tensors,
            self.config if config is None else config,
            name=self.name if name is None else name,
            folder=self.folder,
            infos=self._infos if tensors is None and infos is None else infos,
            notes=self.notes if notes is None else notes,
            sources=(*self.sources, *sources),
            files=self.files if files is None else files,
            device=self.device if device is None else device,
            before_save=self.before_save if before_save is None else before_save,
        )

    def finished(self) -> Checkpoint:
        """The checkpoint as `save` writes it: after every function of `before_save`."""
        checkpoint = self
        for step in self.before_save:
            checkpoint = step(checkpoint)
        return checkpoint.replace(before_save=()) if self.before_save else self

    def companions(self) -> dict[str, bytes]:
        """The files that `save` puts beside the weights, such as the tokenizer's: `files`, or those of `folder`."""
        if self.files is not None or self.folder is None:
            return dict(self.files or {})
        return read_companions(self.folder)

    def module_weights(self) -> dict[str, bytes]:
        """The weights of modules that sentence-transformers runs behind the model, which `save` copies; see there."""
        return {} if self.folder is None else module_weights(self.folder)

    def pooled(self) -> bool:
        """Whether sentence-transformers has modules behind the model."""
        return self.folder is not None and bool(behind(self.folder))

    def readers(self) -> list[str]:
        """The modules of sentence-transformers behind the model that read single units of its hidden states."""
        return [] if self.folder is None else readers(self.folder)

    @checked
    def save(
        self,
        target: str | os.PathLike[str] | Remote,
        *,
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
        extra: Mapping[str, bytes | str] | None = None,
        progress: Callable[[str, int], None] | None = None,
        threads: int | None = None,
        direct: bool = True,
        resume: bool = False,
        fingerprint: str = "",
        executor: Executor | None = None,
    ) -> Place:
        """Write the model as a folder that `from_pretrained` loads; see `symfuse.io.write`.

        target: a path, or a URL of a store. executor: who writes (`symfuse.executors`), instead of threads. resume:
        see there; fingerprint: what it needs to tell this model from another, OptionError without one.
        What is written is `self[name]`, streamed by the mapping's own `blocks(name)` if it has that.
        """
        if resume and not fingerprint:
            raise OptionError("resume needs a fingerprint of what is written, so that two models are never mixed")
        finished = self.finished()
        return write(
            target,
            {name: finished.info(name) for name in finished},
            getattr(finished.tensors, "blocks", finished._in_one_block),
            config=finished.config,
            companions=finished.companions() | finished.module_weights(),
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            extra=extra,
            progress=progress,
            inputs=finished.sources,
            threads=threads,
            direct=direct,
            resume=resume,
            fingerprint=fingerprint,
            executor=executor,
            stem=weight_stem(finished.config, finished.folder),
        )

    @checked
    def push_to_hub(
        self,
        repo_id: str,
        folder: str | os.PathLike[str] | None = None,
        *,
        private: bool | None = None,
        token: str | None = None,
        **options: Any,
    ) -> str:
        """Write the model to a folder, by default one in the working folder with the name of the repository, and upload
        that to the Hugging Face hub; the URL there. The repository is made if it is not there.

        private: of a new repository. token: by default the one of `hf auth login`. options: of `save`. OutputError if
        the hub refuses: the folder stays then, too.
        """
        place = output_place(repo_id.rpartition("/")[2] if folder is None else folder)
        require_upload(repo_id, place, token)
        self.save(place, **options)
        assert isinstance(place, Path)
        return upload(place, repo_id, private=private, token=token)

    def _in_one_block(self, name: str) -> Iterator[Tensor]:
        tensor, info = self[name], self.info(name)
        if TensorInfo.of(tensor) != info:
            raise OutputError(f"{name!r} was announced as {info} and came as {TensorInfo.of(tensor)}")
        return iter((tensor,))


def is_other(lineage: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Whether two lineages are of different models, as far as both say: their sha256 is over the same, and differs."""
    one, other = ((known.get("sha256"), known.get("sha256 of")) for known in (lineage, than))
    return None not in (one[0], other[0]) and one[1] == other[1] and one[0] != other[0]


def _samples(count: int) -> list[tuple[int, int]]:
    """The first, middle and last 64 of so many numbers; or all of them, if they are no more."""
    if count <= 3 * 64:
        return [(0, count)]
    return [(start, start + 64) for start in (0, count // 2 - 32, count - 64)]


class _Cast(Mapping[str, Tensor]):
    """The tensors of a checkpoint in the dtypes of `infos`, from their values before rounding."""

    def __init__(self, source: Checkpoint, infos: Mapping[str, TensorInfo]) -> None:
        self.source = source
        self.infos = infos

    def __getitem__(self, name: str) -> Tensor:
        return self.source.read(name).to(self.infos[name].dtype)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        return self._finite(name, self.source.part(name, start, stop)).to(self.infos[name].dtype)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """As the source has them: who writes them rounds them, once."""
        return (self._finite(name, block) for block in self.source.blocks(name))

    def _finite(self, name: str, values: Tensor) -> Tensor:
        if not is_finite(values):
            self.source.read(name)  # raises, with the counts of the whole tensor
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


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
