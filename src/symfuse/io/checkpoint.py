"""A model as data: its tensors by name, read on demand, and its config."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.arguments import checked
from symfuse.device import CPU, require
from symfuse.errors import CheckpointError, OptionError
from symfuse.executors import Executor
from symfuse.io.companions import behind, module_weights, read_companions, readers
from symfuse.io.folder import weight_stem
from symfuse.io.hub import require_upload, upload
from symfuse.io.lazy import Held, Lazy, Rewritten, Rule
from symfuse.io.remote import Place, Remote, entries
from symfuse.io.stamp import Stamp
from symfuse.io.target import output_place
from symfuse.io.tensors import TensorInfo, is_finite, scan
from symfuse.io.writer import write
from symfuse.messages import shown

__all__ = ["Checkpoint", "TensorInfo", "is_finite", "is_other", "scan"]


# What the sha256 of a lineage covers, in addition to names, dtypes and shapes.
SAMPLED = "the first, middle and last 64 numbers of each tensor"
NAMED = "the name, as its numbers are computed"


class Checkpoint(Lazy):
    """A model as data: its tensors (read lazily), and its config.

    tensors: a `Lazy`, or any mapping; for a mapping that computes its tensors, `infos` has their dtypes and shapes.
    `folder`: where tokenizer and other companion files are, unless `files` replaces them. `notes`: messages for the
    user. `device`: see `on`. `before_save`: functions that `save` applies in order before it writes anything; each
    returns the checkpoint, perhaps with another config or other files, or raises.
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
        self.tensors = tensors if isinstance(tensors, Lazy) else Held(tensors, infos)
        super().__init__(self.tensors.infos)
        self.computed, self.at_hand = self.tensors.computed, self.tensors.at_hand
        self.config: Mapping[str, Any] = copy.deepcopy(dict(config))
        self.name = name
        self.folder = folder
        self.notes = notes
        self.files = files
        self.device = device
        self.before_save = before_save
        self.sources = tuple(dict.fromkeys(sources if folder is None else (folder, *sources)))

    __repr__, _repr_html_ = shown(lambda self: {"name": repr(self.name), "tensors": len(self)})

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(info.nbytes for info in self.infos.values())

    def __getitem__(self, name: str) -> Tensor:
        return self._on_device(self.tensors[name])

    def wide(self, name: str) -> Tensor:
        return self._on_device(self.tensors.wide(name))

    def part(self, name: str, start: int, stop: int) -> Tensor:
        return self._on_device(self.tensors.part(name, start, stop))

    def blocks(self, name: str) -> Iterator[Tensor]:
        return map(self._on_device, self.tensors.blocks(name))

    def saved(self, name: str) -> Iterator[Tensor]:
        return self.tensors.saved(name)

    def file_of(self, name: str) -> str | None:
        return self.tensors.file_of(name)

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Tensors on the meta device have no data to move."""
        return tensor.detach() if tensor.is_meta else tensor.detach().to(self.device)

    def to(self, dtype: torch.dtype) -> Checkpoint:
        """The same model with its floating-point tensors in another dtype, cast when they are read."""
        rules = {
            name: self._cast(name, dtype if i.dtype.is_floating_point else i.dtype) for name, i in self.infos.items()
        }
        tensors = Rewritten(self, rules)
        tensors.computed = False
        return self.replace(tensors=tensors)

    def _cast(self, name: str, dtype: torch.dtype) -> Rule:
        def finite(values: Tensor) -> Tensor:
            if not is_finite(values):
                self.read(name)  # raises, with the counts of the whole tensor
            return values

        return Rule(
            TensorInfo(dtype, self.info(name).shape),
            lambda: self.read(name).to(dtype),
            part=lambda start, stop: finite(self.part(name, start, stop)).to(dtype),
            blocks=lambda: map(finite, self.blocks(name)),
        )

    def on(self, device: str) -> Checkpoint:
        """The same model, read to a device, such as "cuda": each tensor is moved there, in its stored dtype, when it is
        read. Checkpoints made from this one keep the device, unless they set another. OptionError for an unavailable
        device."""
        return self.replace(device=require(device))

    def lineage(self, *, compute: bool = False) -> dict[str, Any]:
        """The identity of this model: name, folder, and a sha256 over names, dtypes, shapes, some numbers of each
        tensor, and whole adapters. For a computed model (aligned, merged) the name replaces the numbers, unless
        `compute`: then the sha256 is that of the saved model. "sha256_of" describes which numbers are covered: models
        that differ only in other numbers have the same sha256.
        """
        computed = self.computed and not compute
        digest = hashlib.sha256(self.name.encode() if computed else b"")
        here = self.on(CPU)
        for name in sorted(self):
            info = self.info(name)
            digest.update(f"{name} {info.dtype} {info.shape}".encode())
            if not computed:
                for start, stop in _samples(info.numel):
                    numbers = here.part(name, start, stop)  # computed numbers are rounded below, as in a saved file
                    digest.update(numbers.to(info.dtype).double().numpy().tobytes())
        local = [folder for folder in self.sources if isinstance(folder, Path)]  # adapters are local
        for path in sorted(path for folder in local for path in folder.glob("adapter_*")):
            digest.update(path.read_bytes())
        folder = None if self.folder is None else str(self.folder)
        of = NAMED if computed else SAMPLED
        return {"name": self.name, "folder": folder, "sha256": digest.hexdigest(), "sha256_of": of}

    def state(self) -> list[tuple[str, int, int | str, tuple[int, ...]]]:
        """Name, size, times of change and inode of every file that the model is read from: equal as long as none is
        written. CheckpointError if one is missing."""
        try:
            files = [path for place in self.sources for path in _files(place)]
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
        """The same model with other tensors, config, name, device or notes, and the same folder. sources: further
        folders that the tensors are read from; `save` never writes into any."""
        return Checkpoint(
            self.tensors if tensors is None else tensors,
            self.config if config is None else config,
            name=self.name if name is None else name,
            folder=self.folder,
            infos=infos,
            notes=self.notes if notes is None else notes,
            sources=(*self.sources, *sources),
            files=self.files if files is None else files,
            device=self.device if device is None else device,
            before_save=self.before_save if before_save is None else before_save,
        )

    def finished(self) -> Checkpoint:
        """The checkpoint that `save` writes: after every function of `before_save`."""
        checkpoint = self
        for step in self.before_save:
            checkpoint = step(checkpoint)
        return checkpoint.replace(before_save=()) if self.before_save else self

    def companions(self) -> dict[str, bytes]:
        """The files that `save` writes beside the weights, such as the tokenizer's: `files`, or those of `folder`."""
        if self.files is not None or self.folder is None:
            return dict(self.files or {})
        return read_companions(self.folder)

    def module_weights(self) -> dict[str, bytes]:
        """The weights of modules that sentence-transformers runs after the model, which `save` copies."""
        return {} if self.folder is None else module_weights(self.folder)

    def pooled(self) -> bool:
        """Whether sentence-transformers has modules after the model."""
        return self.folder is not None and bool(behind(self.folder))

    def readers(self) -> list[str]:
        """The modules of sentence-transformers after the model that read single units of its hidden states."""
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

        target: a path, or a URL of a store. executor: writes instead of threads (`symfuse.executors`). resume: needs a
        fingerprint, which tells this model from others (OptionError without one). Writes `saved(name)`, rounded to the
        dtypes of `infos`.
        """
        if resume and not fingerprint:
            raise OptionError("resume needs a fingerprint of the model, so that two models are never mixed")
        finished = self.finished()
        return write(
            target,
            finished.infos,
            finished.saved,
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
        overwrite: bool = False,
        max_shard_size: int | str = "5GB",
        threads: int | None = None,
    ) -> str:
        """Write the model to a folder (default: the name of the repository, in the working folder), upload that to the
        Hugging Face hub, and return the URL. A missing repository is created.

        private: of a new repository. token: by default the one of `hf auth login`. overwrite, max_shard_size, threads:
        as in `save`. OutputError if the hub refuses; the folder is kept.
        """
        place = output_place(repo_id.rpartition("/")[2] if folder is None else folder)
        require_upload(repo_id, place, token)
        self.save(place, overwrite=overwrite, max_shard_size=max_shard_size, threads=threads)
        assert isinstance(place, Path)
        return upload(place, repo_id, private=private, token=token)


def _files(place: Place) -> list[Place]:
    """The file itself, or the files of a folder."""
    return [place] if place.is_file() else [path for path in entries(place) if path.is_file()]


def is_other(lineage: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Whether two lineages are known to be of different models: their sha256 cover the same data and differ."""
    one, other = ((known.get("sha256"), known.get("sha256_of")) for known in (lineage, than))
    return None not in (one[0], other[0]) and one[1] == other[1] and one[0] != other[0]


def _samples(count: int) -> list[tuple[int, int]]:
    """The ranges of the first, middle and last 64 of `count` numbers, or of all if there are fewer."""
    if count <= 3 * 64:
        return [(0, count)]
    return [(start, start + 64) for start in (0, count // 2 - 32, count - 64)]
