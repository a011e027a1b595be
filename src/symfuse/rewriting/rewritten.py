"""A checkpoint under other names, with more or fewer tensors: read, copied or made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symfuse.errors import SpecError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.model.config import SCALED


@dataclass(frozen=True)
class Origin:
    """Where a tensor of a rewritten checkpoint comes from: another one of the source, scaled; or one in memory."""

    name: str = ""
    factor: float = 1.0
    given: Tensor | None = None


class _Rewritten(Mapping[str, Tensor]):
    """Tensors of a checkpoint under other names, and some more."""

    def __init__(self, source: Checkpoint, origins: Mapping[str, Origin]) -> None:
        self.source = source
        self.origins = origins
        self.infos = {
            name: source.info(origin.name) if origin.given is None else TensorInfo.of(origin.given)
            for name, origin in origins.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        origin = self.origins[name]
        if origin.given is not None:
            return origin.given.contiguous()
        return self.source[origin.name] if origin.factor == 1.0 else self.wide(name).to(self.infos[name].dtype)

    def wide(self, name: str) -> Tensor:
        origin = self.origins[name]
        return self[name] if origin.given is not None else _scaled(self.source.read(origin.name), origin.factor)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        origin = self.origins[name]
        if origin.given is not None:
            return origin.given.reshape(-1)[start:stop]
        return _scaled(self.source.part(origin.name, start, stop), origin.factor)

    def blocks(self, name: str) -> Iterator[Tensor]:
        origin = self.origins[name]
        if origin.given is not None:
            yield origin.given
        else:
            yield from (_scaled(block, origin.factor) for block in self.source.blocks(origin.name))

    def where(self, name: str) -> str | None:
        """The file that holds the tensor as it is, if one does."""
        origin = self.origins[name]
        return self.source.file_of(origin.name) if origin.given is None and origin.factor == 1.0 else None

    def __iter__(self) -> Iterator[str]:
        return iter(self.origins)

    def __len__(self) -> int:
        return len(self.origins)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor


def rewritten(checkpoint: Checkpoint, origins: Mapping[str, Origin], config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with tensors from these origins, and another config."""
    tensors = _Rewritten(checkpoint, origins)
    return checkpoint.replace(tensors=tensors, infos=tensors.infos, config=config)


def renamed(checkpoint: Checkpoint, old: Mapping[str, str]) -> Checkpoint:
    """The tensors that `old` names, by new name → present name."""
    return rewritten(checkpoint, {new: Origin(name) for new, name in old.items()}, checkpoint.config)


def drop(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """The checkpoint without these tensors."""
    gone = set(names)
    return renamed(checkpoint, {name: name for name in checkpoint if name not in gone}) if gone else checkpoint


def untie(checkpoint: Checkpoint, heads: Mapping[str, str]) -> Checkpoint:
    """The same function with an output head of its own. heads: new tensor → the stored one that it copies.

    Families that scale the output of a tied decoder get the head scaled instead. SpecError if the head is stored
    already and differs from the embedding, though config.json says that they are tied.
    """
    config = dict(checkpoint.config)
    factor = 1.0
    if str(config.get("model_type")) in SCALED:
        scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
        factor = float(config["d_model"]) ** -0.5 if scaled else 1.0
        config["scale_decoder_outputs"] = False
    for head, name in heads.items():
        require_equal(checkpoint, head, name)
    config["tie_word_embeddings"] = False
    if isinstance(inner := config.get("text_config"), Mapping) and "tie_word_embeddings" in inner:
        config["text_config"] = {**inner, "tie_word_embeddings": False}
    origins = {name: Origin(name) for name in checkpoint}
    return rewritten(checkpoint, origins | {head: Origin(name, factor) for head, name in heads.items()}, config)


def require_equal(checkpoint: Checkpoint, alias: str, name: str) -> None:
    """SpecError if an alias is stored, and is not what it stands for."""
    if alias in checkpoint and not torch.equal(checkpoint[alias], checkpoint[name]):
        raise SpecError(
            f"{checkpoint.name}: {alias} is {name} by config.json (tie_word_embeddings) or its family, and the stored "
            "tensors differ; set tie_word_embeddings to false if both are meant, or remove the first"
        )


def zero_biases(checkpoint: Checkpoint, infos: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with zero biases of these names and shapes beside its weights. config: fields that say so."""
    origins = {name: Origin(name) for name in checkpoint}
    for name, info in infos.items():
        zero = torch.zeros((), dtype=checkpoint.info(name.removesuffix("bias") + "weight").dtype)
        origins[name] = Origin(given=zero.expand(info.shape))
    return rewritten(checkpoint, origins, {**checkpoint.config, **config})


def with_values(checkpoint: Checkpoint, values: Mapping[str, Tensor]) -> Checkpoint:
    """The checkpoint with these tensors in place of its own."""
    origins = {name: Origin(given=values[name]) if name in values else Origin(name) for name in checkpoint}
    return rewritten(checkpoint, origins, checkpoint.config)
