"""A model in memory as a checkpoint: the names and tensors with which it would be saved, without copying."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from symfuse.errors import CheckpointError
from symfuse.messages import first_line, some

WRAPPER_PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and of data-parallel training

COUNTER = "num_batches_tracked"

Key = tuple[int, tuple[int, ...], tuple[int, ...]]

# Where the configs of modules that carry none are looked up: each gives that of a module that it knows, or None.
CONFIGS: list[Callable[[nn.Module], dict[str, Any] | None]] = []

# The same for models in files, by the shapes of their tensors.
Shapes = Mapping[str, tuple[int, ...]]
CONFIGS_BY_SHAPES: list[Callable[[Shapes], dict[str, Any] | None]] = []


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile and data-parallel training."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def carried_config(module: nn.Module) -> Any:
    """The config object that a module carries, as those of transformers do; None if it carries none."""
    config = getattr(module, "config", None)
    return config if hasattr(config, "to_dict") else None


def module_config(module: nn.Module) -> dict[str, Any] | None:
    """The config of a transformers model, with its class name, as it would be saved; or that of a declared module."""
    if (own := carried_config(module)) is None:
        return next((config for known in CONFIGS if (config := known(module)) is not None), None)
    try:
        config = dict(own.to_dict())
    except Exception as error:  # whatever that class raises
        raise CheckpointError(f"{type(module).__name__}: its config gives no fields: {first_line(error)}") from error
    config["architectures"] = config.get("architectures") or [type(module).__name__]
    return config


def shapes_of(module: nn.Module) -> Shapes:
    """Of all tensors of a module, by name. CheckpointError for parameters that have none yet."""
    tensors = {name: one for name, one in module.state_dict().items() if isinstance(one, Tensor)}
    if lazy := [name for name, one in tensors.items() if is_lazy(one)]:
        raise CheckpointError(
            f"{type(module).__name__}: {some(lazy)} without a shape before the first run; run the module once"
        )
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def config_by_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """The config of a model that has none, if a family knows its names and shapes."""
    return next((config for known in CONFIGS_BY_SHAPES if (config := known(shapes)) is not None), None)


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module under the names on disk: tied ones once, without names that saving ignores.

    Raises CheckpointError for a model with an adapter attached, and for one that stores something else than tensors.
    """
    if getattr(module, "peft_config", None):
        raise CheckpointError(
            f"{type(module).__name__} has an adapter attached: merge it first (merge_and_unload() of peft)."
        )
    if others := [name for name, one in module.state_dict().items() if not isinstance(one, Tensor)]:
        raise CheckpointError(
            f"{type(module).__name__} stores something else than tensors: {some(others)}; is it quantised? Give the "
            "module as it was before"
        )
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    tensors = {name: tensor for name, tensor in module.state_dict().items() if name not in ignored}
    tensors = _without_ties(tensors, _declared_ties(module))
    return as_on_disk(module, tensors)


def names_in_memory(module: nn.Module) -> dict[str, str]:
    """{name on disk: name in the module} of the weights that are whole in both."""
    tensors = module.state_dict()
    names = {id(tensor): name for name, tensor in tensors.items()}
    return {disk: names[id(tensor)] for disk, tensor in as_on_disk(module, tensors).items() if id(tensor) in names}


def _declared_ties(module: nn.Module) -> list[re.Pattern[str]]:
    """Patterns of the names that a transformers model declares as tied."""
    parts = (getattr(part, "_tied_weights_keys", None) or () for part in module.modules())
    return [re.compile(name) for names in parts for name in names]


def _without_ties(tensors: Mapping[str, Tensor], declared: list[re.Pattern[str]]) -> dict[str, Tensor]:
    """Remove declared ties among names that share memory; one name always stays."""
    groups: dict[Key, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        groups[memory(tensor)].append(name)
    dropped: set[str] = set()
    for names in groups.values():
        tied = [name for name in names if any(pattern.search(name) for pattern in declared)]
        dropped.update(tied if len(tied) < len(names) else tied[1:])
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}


def aliases(module: nn.Module) -> dict[str, str]:
    """Of parameters that are one under several names: each other name → the first."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(one)] for name, one in every if name != first[id(one)]}


def constants(module: nn.Module) -> set[str]:
    """The names of buffers that no training changes: all but the statistics of batch normalisation."""
    parts = ((at, part) for at, part in module.named_modules() if not isinstance(part, _NormBase))
    return {f"{at}.{name}".lstrip(".") for at, part in parts for name, _ in part.named_buffers(recurse=False)}


def untied(module: nn.Module) -> nn.Module:
    """The module, each parameter of which has been given memory of its own."""
    for name in aliases(module):
        at, _, leaf = name.rpartition(".")
        parameter = getattr(module.get_submodule(at), leaf)
        setattr(module.get_submodule(at), leaf, nn.Parameter(parameter.detach().clone()))
    return module


def as_on_disk(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo the conversions of transformers 5, which stacks experts and renames tensors in memory."""
    if not any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = module
    on_disk: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return on_disk


def class_prefix(module: nn.Module) -> str:
    """The prefix of the base model's tensors in its class with a head; "." if the class has none."""
    return f"{getattr(module, 'base_model_prefix', '')}."


def spelt(name: str, prefix: str, names: Container[str]) -> str | None:
    """The spelling of a name among `names`, which may have or lack the prefix of the base model."""
    return next((one for one in (name, prefix + name, name.removeprefix(prefix)) if one in names), None)


def memory(tensor: Tensor) -> Key:
    """A key that is equal for tensors with the same memory, shape and strides; never equal for empty tensors."""
    return (tensor.data_ptr() or id(tensor), tuple(tensor.shape), tensor.stride())


def counts_batches(name: str) -> bool:
    """Whether a buffer counts the training batches of batch normalisation, which evaluation does not use."""
    return name.rpartition(".")[2] == COUNTER


def ties(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[str]:
    """Vocabulary tensors that share the memory of an earlier one, if the config ties them."""
    if config.get("tie_word_embeddings") is not True:
        return []
    earlier: set[Key] = set()
    tied = []
    for name, tensor in tensors.items():
        if tensor.dim() > 0 and tensor.shape[0] == config.get("vocab_size"):
            if memory(tensor) in earlier:
                tied.append(name)
            earlier.add(memory(tensor))
    return tied


def without_prefixes(model: str, names: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """New name → name in the source, without wrappers' prefixes, which all names must have or lack."""
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
