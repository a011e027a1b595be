"""Statistics of a model from data, saved as a folder: the Fisher information of its weights, or the Gram matrices of
the inputs of its linear maps.

A folder has one file for each layer, and `statistics.json`, which describes them.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from torch import Tensor

from symfuse import __version__
from symfuse.arguments import checked, require_type
from symfuse.errors import CheckpointError, IncompatibleError, LayoutError, OptionError
from symfuse.io import TensorInfo, is_other, scan
from symfuse.io.folder import read_json
from symfuse.io.lazy import Held, Lazy, StoredTensors
from symfuse.io.remote import Place
from symfuse.io.safetensors_file import read_safetensors
from symfuse.io.writer import output_folder, write_tensors
from symfuse.messages import some, with_current_keys
from symfuse.model import Model
from symfuse.model.stacks import Piece, piece_of
from symfuse.spec import Spec

Kind = Literal["fisher", "gram"]
# The suffixes of the tensors of each kind, after the name of a weight.
SUFFIXES: Mapping[str, Mapping[str, str]] = {"fisher": {"fisher": ""}, "gram": {"gram": ".gram", "sum": ".sum"}}
INDEX, FORMAT = "statistics.json", 1
_DATA = {
    "format": int,
    "statistics": str,
    "count": int,
    "inputs": dict[str, tuple[str, int, int]],
    "files": dict[str, str],
    "provenance": dict[str, object],
}


@dataclass(frozen=True)
class Input:
    """The input of a weight. entry: the weight under whose name the Gram matrix is stored, the first of those that
    share this input. dim: the dimension of the weight that reads the input. positions: how many were summed."""

    entry: str
    dim: int
    positions: int


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of a model.

    kind: "fisher", tensors by canonical name with the shapes of the model's; or "gram", of the inputs of weights Σ x xᵀ
    [n, n] as NAME.gram and Σ x [n] as NAME.sum, where NAME is an entry of `inputs`. tensors: read lazily. count: of
    examples. provenance: JSON data; "model": the model's lineage. inputs: of a Gram, by the canonical name of each
    weight. name: for messages. sources: files that are read, which are never written to.

    Tensors are checked when they are read: CheckpointError for NaN, infinity, negative numbers in a Fisher information,
    and matrices that are no Gram matrix.
    """

    kind: Kind
    tensors: Mapping[str, Tensor]
    count: int
    provenance: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Input] = field(default_factory=dict)
    name: str = "statistics"
    sources: tuple[Place, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __repr__(self) -> str:
        return f"Statistics({self.kind!r}, {self.name!r}, {len(self.infos)} tensors, {self.count} examples)"

    @cached_property
    def _lazy(self) -> Lazy:
        return self.tensors if isinstance(self.tensors, Lazy) else Held(self.tensors)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of each tensor."""
        return self._lazy.infos

    @property
    def totals(self) -> Mapping[str, float]:
        """The scale of the entries of a Fisher information: their "mean" over all tensors, and the Euclidean "norm" of
        all. Computed once, on first use, with one tensor in memory at a time."""
        with self._lock:
            return self._totals

    @cached_property
    def _totals(self) -> Mapping[str, float]:
        sums, squares = list[float](), list[float]()
        for name in self.infos:
            tensor = self.read(name)
            sums.append(tensor.sum(dtype=torch.float64).item())
            squares.append(torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2)
        count = sum(info.numel for info in self.infos.values())
        return {"mean": math.fsum(sums) / max(1, count), "norm": math.sqrt(math.fsum(squares))}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        tensor = self._checked(name, self.tensors[name])
        if self.kind == "gram" and tensor.ndim == 2 and tensor.numel() and (fault := _gram_fault(tensor)):
            raise CheckpointError(f"{name!r} of {self.name} {fault}: this is no Gram matrix; collect it again")
        return tensor

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """The elements from start to stop of a flattened tensor. From a file only these are read; of a computed tensor
        each thread keeps the whole until it asks for another."""
        return self._checked(name, self._lazy.part(name, start, stop))

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        where = "/".join(filter(None, (self.name, self._lazy.file_of(name))))
        scan(name, tensor, where)
        if self.kind == "fisher" and tensor.numel() and (least := tensor.float().amin().item()) < 0:
            raise CheckpointError(
                f"{name!r} of {where} holds {least:g}, and squared gradients are at least 0: this is no Fisher "
                "information, or it is damaged; collect it again"
            )
        return tensor

    def of(self, name: str, spec: Spec | None = None) -> OfTensor | None:
        """The statistics of the model's tensor of that canonical name; None if there are none. spec: the model's
        declaration, which also gives the Fisher information of the pieces of a stack, as `Model.as_in` names them
        (STACK.number)."""
        if name in (self.infos if self.kind == "fisher" else self.inputs):
            return OfTensor(self, name)
        piece = None if spec is None or self.kind != "fisher" else piece_of(name, spec)
        return None if piece is None or piece.stack not in self.infos else OfTensor(self, piece.stack, piece)

    def require(self, model: Model) -> None:
        """IncompatibleError unless these are statistics of that model: taken from its weights, with its names and
        shapes."""
        of, lineage = self.provenance.get("model") or {}, model.checkpoint.lineage(compute=True)
        before = (self.provenance.get("moved_from") or {}).get("model") or {}
        if of.get("sha256") is None and before.get("sha256") == lineage["sha256"]:
            raise IncompatibleError(
                f"{self.name}: transported by an alignment of {model.name}, but this is the unaligned model; take the "
                "statistics from before, or the aligned model"
            )
        if is_other(of, lineage):
            raise IncompatibleError(
                f"{self.name}: taken from another model, {of.get('name')!r}, not from {model.name}; collect them again "
                "from this one, or, if this is that model aligned, move them with the alignment (`symfuse transport`)"
            )
        self.fit(model)

    def fit(self, model: Model) -> None:
        """IncompatibleError unless they have the names and shapes of that model's tensors."""
        self.require_shapes(model.spec, model.name)

    def require_shapes(self, spec: Spec, model: str) -> None:
        """IncompatibleError for the statistics of a tensor that a model does not have, or has in another shape."""
        for name in self.infos if self.kind == "fisher" else self.inputs:
            actual = self.infos[name].shape if self.kind == "fisher" else self._width(name)
            shape = spec.tensors[name].layout.shape(spec.sizes) if name in spec.tensors else ()
            expected = shape if self.kind == "fisher" else shape[self.inputs[name].dim :][:1]
            if actual != expected or name not in spec.tensors:
                raise IncompatibleError(
                    f"{self.name}: the {self.kind} of {name!r} is of shape {list(actual)}, expected "
                    f"{list(expected) if name in spec.tensors else 'none'} for {model}; collect them again from it"
                )

    def _width(self, name: str) -> tuple[int, ...]:
        return self.infos[f"{self.inputs[name].entry}.gram"].shape[:1]

    def notes(self) -> tuple[str, ...]:
        """Messages for the user: about Gram matrices of fewer positions than inputs, which are singular."""
        few = {
            i.entry: f"{i.entry} ({i.positions} positions, {self._width(n)[0]} inputs)"
            for n, i in self.inputs.items()
            if i.positions < self._width(n)[0]
        }
        if not few:
            return ()
        return (f"{self.name}: too few data for a Gram matrix of full rank: {some(list(few.values()), 2)}; take more",)

    @checked
    def save(self, folder: str | os.PathLike[str], extra: Mapping[str, str] | None = None) -> Path:
        """Write a new folder; extra: more files by name. All or nothing is written. Raises OutputError if the folder
        exists, overlaps with an input, or cannot be written."""
        nbytes = sum(4 * info.numel for info in self.infos.values()) + sum(map(len, (extra or {}).values()))
        with output_folder(folder, nbytes, self.sources) as partial:
            self.write(partial)
            for name, text in (extra or {}).items():
                (partial / name).write_text(text, "utf-8")
        return Path(folder)

    def write(self, folder: Path) -> None:
        """Write the files into a folder, tensors as float32, one of them in memory at a time."""
        files: dict[str, str] = {name: _file(name) for name in self.infos}
        for file in dict.fromkeys(files.values()):
            infos = {n: TensorInfo(torch.float32, self.infos[n].shape) for n, at in files.items() if at == file}
            write_tensors(folder / file, infos, self.read)
        data = {
            "format": FORMAT,
            "symfuse": __version__,
            "statistics": self.kind,
            "count": self.count,
            "inputs": {name: [i.entry, i.dim, i.positions] for name, i in self.inputs.items()},
            "files": files,
            "provenance": dict(self.provenance),
        }
        (folder / INDEX).write_text(json.dumps(data, indent=1) + "\n", "utf-8")

    @classmethod
    @checked
    def load(cls, folder: str | os.PathLike[str]) -> Statistics:
        """Read what `save` wrote; tensors are read lazily. CheckpointError, with file and key, for anything else."""
        place = Path(folder)
        if not (place / INDEX).is_file():
            raise CheckpointError(f"{place} holds no {INDEX}; expected a folder of statistics, as symfuse saves them")
        data = read_json(place / INDEX)
        try:
            require_type(data, _DATA, INDEX)
            data["provenance"] = with_current_keys(data["provenance"])
            _require_lineage(data["provenance"], f"{INDEX}.provenance")
        except LayoutError as error:
            raise CheckpointError(f"{place}: {error}; collect the statistics again") from error
        if data["format"] != FORMAT or data["statistics"] not in SUFFIXES:
            raise CheckpointError(
                f"{place / INDEX}: 'format' {data['format']} of 'statistics' {data['statistics']!r}, expected {FORMAT} "
                f"of {' or '.join(SUFFIXES)}; collect them again with this version"
            )
        inputs = {name: Input(*values) for name, values in data["inputs"].items()}
        tensors = _stored(place, data["files"])
        statistics = cls(data["statistics"], tensors, data["count"], data["provenance"], inputs, place.name, (place,))
        statistics._require_whole(place)
        return statistics

    def _require_whole(self, place: Path) -> None:
        """CheckpointError unless the tensors have the names and shapes of Gram matrices."""
        for name, info in self.infos.items():
            if not info.dtype.is_floating_point:
                raise CheckpointError(f"{place}: {name!r} is {info}, expected floating-point numbers")
        if not self.infos:
            raise CheckpointError(f"{place / INDEX}: 'files' is empty; these statistics are of nothing, collect again")
        most = max((self.count, *(entry.positions for entry in self.inputs.values())))
        if self.count < 1 or most > 2**53 or (self.kind == "fisher" and self.inputs):
            raise CheckpointError(
                f"{place / INDEX}: 'count' or 'inputs' make no sense for {self.kind} statistics; collect them again"
            )
        if self.kind == "fisher":
            return
        expected = {f"{i.entry}{suffix}" for i in self.inputs.values() for suffix in SUFFIXES["gram"].values()}
        if wrong := sorted(expected ^ self.infos.keys()):
            raise CheckpointError(f"{place / INDEX}: {some(wrong)} in one of 'inputs' and 'files' only")
        for name, entry in self.inputs.items():
            gram, total = (self.infos[f"{entry.entry}{suffix}"].shape for suffix in (".gram", ".sum"))
            if (
                len(gram) != 2
                or gram[0] != gram[1]
                or total != gram[:1]
                or entry.positions < 1
                or entry.dim not in (0, 1)
            ):
                raise CheckpointError(
                    f"{place}: the Gram matrix of {name!r} is {list(gram)}, the sum {list(total)}, over "
                    f"{entry.positions} positions along dimension {entry.dim}; expected [n, n] and [n]"
                )


@dataclass(frozen=True, eq=False)
class OfTensor:
    """The statistics of one tensor of a model, or of a piece of it."""

    statistics: Statistics
    name: str
    piece: Piece | None = None

    @property
    def values(self) -> Mapping[str, Any]:
        """count: of examples. Of a Gram also `dim` and `positions` (see `Input`); of a Fisher information also `mean`
        and `norm` over all its tensors."""
        count = {"count": self.statistics.count}
        if self.statistics.kind == "fisher":
            return {**count, **self.statistics.totals}
        entry = self.statistics.inputs[self.name]
        return {**count, "dim": entry.dim, "positions": entry.positions}

    def read(self, key: str) -> Tensor:
        """ "fisher", of the tensor's shape; or "gram" [n, n] and "sum" [n] of its input, over all positions."""
        if self.piece is None:
            return self.statistics.read(self._key(key))
        return self.part(key, 0, self.piece.numel).reshape(self.piece.shape)

    def part(self, key: str, start: int, stop: int) -> Tensor:
        """Some elements of the flattened tensor."""
        first = 0 if self.piece is None else self.piece.start
        return self.statistics.part(self._key(key), first + start, first + stop)

    def _key(self, key: str) -> str:
        suffixes = SUFFIXES[self.statistics.kind]
        if key not in suffixes:
            raise OptionError(
                f"{self.statistics.name} are {self.statistics.kind} statistics, which have no {key!r} of {self.name!r}"
            )
        entry = self.statistics.inputs.get(self.name)
        return (self.name if entry is None else entry.entry) + suffixes[key]


def _require_lineage(provenance: Mapping[str, Any], key: str) -> None:
    """LayoutError unless the entries that describe models, now and before a transport, are objects."""
    for name in ("model", "moved_from", "by"):
        if provenance.get(name) is not None:
            require_type(provenance[name], dict[str, object], f"{key}.{name}")
            _require_lineage(provenance[name], f"{key}.{name}")


def _gram_fault(gram: Tensor) -> str | None:
    """Why a matrix cannot be a Gram matrix, in words; None if its entries do not show it. Up to rounding, a Gram matrix
    is symmetric, its diagonal is not negative, and no entry is larger than the largest of the diagonal."""
    diagonal = gram.diagonal().double()
    slack = 1e-4 * float(diagonal.abs().amax())
    if (least := float(diagonal.amin())) < -slack:
        return f"has {least:g} on its diagonal, where sums of squares are"
    if (apart := float((gram - gram.T).abs_().amax())) > slack:
        return f"is not symmetric: entries that should be equal differ by {apart:g}"
    if (largest := max(abs(float(end)) for end in gram.aminmax())) > float(diagonal.amax()) + slack:
        return f"has entries of {largest:g}, larger than all on its diagonal"
    return None


def _file(name: str) -> str:
    """The file of a tensor: one for each layer, by the first number in the name."""
    layer = re.search(r"(?<![^.])(\d+)\.", name)
    return "others.safetensors" if layer is None else f"layer-{int(layer[1]):05d}.safetensors"


def _stored(place: Path, files: Mapping[str, str]) -> StoredTensors:
    """The tensors that an index lists, each read from the file that it names."""
    stored = {}
    for file in dict.fromkeys(files.values()):
        if PurePath(file).name != file or len(file) > 255 or not (place / file).is_file():
            raise CheckpointError(f"{place / INDEX} names {file!r:.80}, which is not there; complete the copy")
        stored[file] = read_safetensors(place / file)
    faults = [name for name, file in files.items() if name not in stored[file]]
    faults += [name for file, held in stored.items() for name in held if files.get(name) != file]
    if faults:
        raise CheckpointError(f"{place / INDEX} and the files beside it disagree on {some(faults)}; collect them again")
    return StoredTensors({name: stored[file][name] for name, file in files.items()})
