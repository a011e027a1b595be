"""Names of tensors: the prefixes that wrappers leave, and several names for one memory."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor, nn

from symfuse.errors import CheckpointError

WRAPPER_PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and of data-parallel training

COUNTER = "num_batches_tracked"

Key = tuple[int, tuple[int, ...], tuple[int, ...]]


def class_prefix(module: nn.Module) -> str:
    """What names of a base model are preceded by in its class with a head; "." if the class has no such name."""
    return f"{getattr(module, 'base_model_prefix', '')}."


def spelt(name: str, prefix: str, there: Container[str]) -> str | None:
    """A name as it is among others, which may have the prefix of the base model, or lack it."""
    return next((one for one in (name, prefix + name, name.removeprefix(prefix)) if one in there), None)


def memory(tensor: Tensor) -> Key:
    """Equal for tensors that are the same memory, seen in the same way; never equal for empty ones."""
    return (tensor.data_ptr() or id(tensor), tuple(tensor.shape), tensor.stride())


def counts_batches(name: str) -> bool:
    """Whether a buffer counts the batches that batch normalisation has seen in training: evaluation does not use it."""
    return name.rpartition(".")[2] == COUNTER


def ties(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[str]:
    """Vocabulary tensors that are the memory of an earlier one, where the config says that these are tied."""
    if config.get("tie_word_embeddings") is not True:
        return []
    seen: set[Key] = set()
    later = []
    for name, tensor in tensors.items():
        if tensor.dim() > 0 and tensor.shape[0] == config.get("vocab_size"):
            if memory(tensor) in seen:
                later.append(name)
            seen.add(memory(tensor))
    return later


def without_prefixes(model: str, names: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """New name → name in the source, without the wrappers' prefixes that all names have, however often."""
    current, stripped = dict(names), ""
    while True:
        for prefix in WRAPPER_PREFIXES:
            having = [name for name in current if name.startswith(prefix)]
            if len(having) == len(current):
                current = {name.removeprefix(prefix): old for name, old in current.items()}
                stripped += prefix
                break
            if having:
                rest = [name for name in current if not name.startswith(prefix)]
                raise CheckpointError(
                    f"{model}: {len(having)} of {len(current)} tensors have the prefix {prefix!r} "
                    f"({having[0]!r}), the others not ({rest[0]!r}). Save the unwrapped model."
                )
        else:
            return current, (f"the prefix {stripped} was stripped from all names",) if stripped else ()
