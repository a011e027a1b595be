"""Check that one module can compute each of several models by swapping weights."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from symfuse.errors import IncompatibleError
from symfuse.evaluation.identity import attributes, setting
from symfuse.io import Checkpoint
from symfuse.io.live import module_config
from symfuse.messages import some
from symfuse.model.config import differences, label_clash

_ABSENT = ("", "absent")


def require_one_function(
    sources: Sequence[Checkpoint | nn.Module], names: Sequence[str], *, bare: bool, labels: bool
) -> None:
    """IncompatibleError unless the models differ in their weights alone: not in settings of their configs that change
    what the same weights compute, or, if `bare` (live modules without configs), in no submodule and no setting of one.
    labels: the order of the labels matters too."""
    configs = [_with_config(source, name) for source, name in zip(sources, names, strict=True)]
    known = [(name, config) for name, config in zip(names, configs, strict=True) if config is not None]
    for name, other in known[1:]:
        first_name, first = known[0]
        types = [str(one.config.get("model_type")) for one in (first, other)]
        if types[0] != types[1]:
            raise IncompatibleError(
                f"{first_name} and {name}: one is a {types[0]}, the other a {types[1]}; between models of different "
                "families there is no path"
            )
        if labels:
            _require_same_order(first, other)
        if result := [d for d in differences(first, other) if d.matters]:
            more = f" (and in {some(d.field for d in result[1:])})" if result[1:] else ""
            raise IncompatibleError(
                f"{first_name} and {name}: config.json differs in {result[0]}{more}, so that no one module is both; a "
                "path leads between models that differ in their weights alone"
            )
    live = [
        (name, source)
        for name, source, config in zip(names, sources, configs, strict=True)
        if config is None and isinstance(source, nn.Module)
    ]
    for name, module in live[1:] if bare else ():
        first_name, first_module = live[0]
        ours, theirs = _settings(first_module), _settings(module)
        if wrong := [key for key in ours | theirs if ours.get(key, _ABSENT)[0] != theirs.get(key, _ABSENT)[0]]:
            key = wrong[0]
            here, there = ours.get(key, _ABSENT)[1], theirs.get(key, _ABSENT)[1]
            how = "is another" if here == there else f"is {here} in one and {there} in the other"
            raise IncompatibleError(
                f"{first_name} and {name}: {key} {how}, so that no one module is both; a path leads between models "
                "that differ in their weights alone (give `build`, which makes the module, if this does not matter)"
            )


def require_read(module: nn.Module, stored: Collection[str], read: Collection[str], name: str) -> None:
    """IncompatibleError if a model has layers that the module does not have. Heads of other tasks may be left over."""
    layers = {_any_layer(one) for one in read if _any_layer(one) != one}
    if over := [one for one in stored if one not in read and _any_layer(one) in layers]:
        raise IncompatibleError(
            f"{name}: a {type(module).__name__} of this depth has no place for {some(over)}; its config.json and its "
            "weights, or those of the models on the path, do not fit together"
        )


def require_equal_ties(module: nn.Module, model: Mapping[str, Tensor], name: str) -> None:
    """IncompatibleError if two weights are tied in the module and differ in the model."""
    kept = module.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for alias, weight in kept.items():
        first = names.setdefault(id(weight), alias)
        if first != alias and alias in model and first in model and not torch.equal(model[first], model[alias]):
            raise IncompatibleError(
                f"{name}: {alias} and {first} are one weight in {type(module).__name__}, and here they differ; "
                "give models that are all tied, or none"
            )


def most_weights(modules: Sequence[nn.Module]) -> nn.Module:
    """The module that can represent all of them with respect to ties: the one that ties least, the last of several."""
    return max(reversed(modules), key=lambda module: len(list(module.parameters())))


def _require_same_order(one: Checkpoint, other: Checkpoint) -> None:
    if clash := label_clash(one.config, other.config):
        raise IncompatibleError(
            f"{one.name} and {other.name}: {clash}, so a path between their heads mixes the rows of different labels; "
            "bring the rows of one head and its config into the order of the other"
        )


def _with_config(source: Checkpoint | nn.Module, name: str) -> Checkpoint | None:
    if isinstance(source, Checkpoint):
        return source
    config = module_config(source)
    return None if config is None or "model_type" not in config else Checkpoint({}, config, name=name)


def _settings(module: nn.Module) -> dict[str, tuple[str, str]]:
    """A description of a module without its weights, by path, for comparison and messages: the class of each submodule,
    its repr, and its public attributes. Dropout does not count, as it does nothing in evaluation, nor does the origin
    of the weights (timm's `pretrained_cfg`)."""
    result: dict[str, tuple[str, str]] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            continue
        at = f"{path or type(module).__name__}"
        written = f"{type(part).__name__}({part.extra_repr()})"
        result[at] = written, written
        for key, value in attributes(part).items():
            if "dropout" not in key and not key.endswith("_cfg"):
                result[f"{at}.{key}"] = setting(value), _in_words(value)
    return result


def _in_words(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return getattr(value, "__qualname__", None) or reprlib.repr(value)


def _any_layer(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
