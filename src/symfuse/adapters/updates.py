"""What an adapter of peft changes, module by module, without its base: the input of a merge of adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from symfuse.adapters.config import CONFIG, MODEL_WEIGHTS, Config, is_adapter, read_tensors
from symfuse.adapters.lora import MAGNITUDE, changes_of, keys_of, pair_of, splitting
from symfuse.errors import CheckpointError, IncompatibleError
from symfuse.io import Checkpoint, scan
from symfuse.io.folder import read_json
from symfuse.io.installed import in_memory
from symfuse.io.lazy import StoredTensors
from symfuse.messages import some

BIAS = "B.bias"


@dataclass(frozen=True)
class Updates:
    """An adapter: plain LoRA, rank-stabilised, with biases, or DoRA. written: the content of its config. factors: by
    module, the keys of its factors by kind (see `keys_of`). whole: the keys of tensors that it holds as a whole, by
    name in the base."""

    folder: Path
    config: Config
    written: Mapping[str, Any]
    tensors: StoredTensors
    notes: tuple[str, ...]
    factors: Mapping[str, Mapping[str, str]]
    whole: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> Updates:
        """CheckpointError for a folder that is no adapter, is one of another kind, or is damaged."""
        if not folder.is_dir() or not is_adapter(folder):
            weights = folder.is_dir() and any(MODEL_WEIGHTS.fullmatch(path.name) for path in folder.iterdir())
            found = "it holds a model" if weights else f"it has no {CONFIG}" if folder.is_dir() else "no such folder"
            raise CheckpointError(f"{folder} is not the folder of an adapter: {found}")
        config, (tensors, notes) = Config.read(folder, dora=True), read_tensors(folder)
        wholes, factors = keys_of(folder.name, config, tensors)
        for module, keys in factors.items():
            _, up = pair_of(folder.name, config, module, keys, tensors)
            for kind in {BIAS, MAGNITUDE} & keys.keys():
                if tensors.infos[keys[kind]].shape != tensors.infos[up].shape[:1]:
                    raise CheckpointError(
                        f"{folder}: {keys[kind]!r} is {tensors.infos[keys[kind]]}, expected the "
                        f"{tensors.infos[up].shape[0]} rows of {up!r}"
                    )
            if config.dora and ("embedding_A" in keys or len(tensors.infos[keys["A.weight"]].shape) > 2):
                raise CheckpointError(
                    f"{folder}: DoRA of {module}, which is no linear layer, cannot be merged into an adapter; merge "
                    "the models that peft makes of the adapters (merge_and_unload)"
                )
            if config.dora and MAGNITUDE not in keys:
                raise CheckpointError(f"{folder}: {module} has no magnitude (lora_{MAGNITUDE}), which DoRA has")
        return cls(folder, config, read_json(folder / CONFIG), tensors, notes, factors, wholes)

    def pair(self, module: str) -> tuple[str, str]:
        """The keys of A and B."""
        return pair_of(self.folder.name, self.config, module, self.factors[module], self.tensors)

    def rank(self, module: str) -> int:
        """Of the update of a module; 0 if it has none."""
        return self.config.rank_of(module) if module in self.factors else 0

    def tensor(self, key: str) -> Tensor:
        """In float64. CheckpointError for NaN or infinity."""
        tensor = self.tensors[key]
        scan(key, tensor, str(self.folder))
        return tensor.double()

    def matrices(self, module: str) -> tuple[Tensor, Tensor]:
        """A (rank × in) and scale·B (out × rank), in float64."""
        down, up = (self.tensor(key).flatten(1) for key in self.pair(module))
        return down, self.config.scale_of(module) * up

    def shape(self, module: str) -> tuple[tuple[int, ...], ...]:
        """The dimensions of A and B other than the rank."""
        down, up = (self.tensors.infos[key].shape for key in self.pair(module))
        return down[1:], (up[0], *up[2:])


@dataclass(frozen=True)
class Ground:
    """The base of an adapter. layers: by module, the name of its weight, and whether it stores [in, out]. names: the
    tensors there of those that the adapter holds as a whole, by name; those that the base lacks (new heads) are left
    out."""

    base: Checkpoint
    layers: Mapping[str, tuple[str, bool]]
    names: Mapping[str, str]

    @classmethod
    def of(cls, updates: Updates, base: Checkpoint) -> Ground:
        """CheckpointError for targets that the base does not have, or in other shapes."""
        new = {key for name, key in updates.whole.items() if not _ends_like(name, base)}
        tensors = updates.tensors.renamed({key: key for key in updates.tensors if key not in new})
        known = splitting(tensors, base)
        base = base if known is None else in_memory(base, known)
        changes = changes_of(updates.folder.name, updates.config, tensors, base)
        by_key = {change.down: (name, change.transposed) for name, change in changes.items() if change.down}
        files = {change.whole: name for name, change in changes.items() if change.whole}
        return cls(
            base,
            {module: by_key[updates.pair(module)[0]] for module in updates.factors},
            {name: files[key] for name, key in updates.whole.items() if key in files},
        )

    def weight(self, module: str) -> Tensor:
        """Of a linear layer, (out × in), in float64."""
        name, transposed = self.layers[module]
        weight = self.base.read(name).double()
        return weight.T if transposed else weight


def _ends_like(name: str, base: Checkpoint) -> bool:
    return any(f".{one}".endswith(f".{name}") or f".{name}".endswith(f".{one}") for one in base)


def require_alike(adapters: Sequence[Updates]) -> None:
    """IncompatibleError for adapters of models with other shapes or names, and for a module that one adapter changes by
    factors and another holds as a whole."""
    first: dict[str, Updates] = {}
    for one in adapters:
        for module in one.factors:
            other = first.setdefault(module, one)
            if one.shape(module) != other.shape(module):
                raise IncompatibleError(
                    f"{module}: A and B are {_shapes(other, module)} in {other.folder} and {_shapes(one, module)} in "
                    f"{one.folder}; only the rank may differ. Give adapters of one base, or move them to one first "
                    "(symfuse rebase ADAPTER --from BASE --onto OTHER)"
                )
    for one in adapters:
        names = {*one.factors, *(name.rpartition(".")[0] for name in one.whole)}
        for module in first.keys() - one.factors.keys():
            if f"{module}.weight" in one.whole:
                raise IncompatibleError(
                    f"{module} is held as a whole by {one.folder}, and changed by factors in {first[module].folder}; "
                    "merge the models (BASE+ADAPTER of each), and extract an adapter (symfuse extract-lora)"
                )
            shorter = (module[dot + 1 :] for dot, letter in enumerate(module) if letter == ".")
            if alike := [name for name in shorter if name in names and name not in first[module].factors]:
                raise IncompatibleError(
                    f"{first[module].folder} has {module}, and {one.folder} has {some(alike)}: the same layer under "
                    "the name of another class. Save both with the same class of base"
                )


def _shapes(one: Updates, module: str) -> str:
    return " and ".join(str(list(one.tensors.infos[key].shape)) for key in one.pair(module))
