"""Points in weight space: one live module whose weights are set, in place, to combinations of models in files; and the
check that one module can compute each of several models by swapping weights."""

from __future__ import annotations

import copy
import itertools
import re
import reprlib
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from symfuse.architectures.base import is_declared, modern
from symfuse.architectures.names import LEGACY
from symfuse.device import require
from symfuse.errors import CheckpointError, IncompatibleError, OptionError
from symfuse.evaluation.identity import attributes, setting
from symfuse.evaluation.task import Loss, Score, Task, measure
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.live import class_prefix, constants, counts_batches, module_config, names_in_memory, spelt
from symfuse.messages import some
from symfuse.model import as_declared
from symfuse.model.config import differences, label_clash
from symfuse.modules import build_module, live
from symfuse.rewriting.ties import match_ties

Build = Callable[[Checkpoint], nn.Module]
_ABSENT = ("", "absent")


class WeightSpace:
    """The affine hull of some models, one live module at a time.

    module: its weights are overwritten by `set`, and nothing else is in memory. models: for each, its tensors by the
    module's names, read lazily. Raises IncompatibleError if one lacks a weight of the module, or has it in another
    shape.
    """

    def __init__(self, module: nn.Module, models: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> None:
        self.module = module
        self.models = tuple(models)
        self.names = tuple(names)
        # Each tensor once, if it is tied. An aligned model has no constants: the module's own are everybody's.
        lacking = {name for name in constants(module) if any(name not in model for model in models)}
        buffers = {name: buffer for name, buffer in _persistent_buffers(module).items() if name not in lacking}
        self.weights = dict(module.named_parameters()) | buffers
        for model, name in zip(models, names, strict=True):
            _require(self.weights, model, name, module)

    def set(self, coefficients: Sequence[float]) -> nn.Module:
        """The module with weights Σ cᵢ Wᵢ for coefficients that sum to 1; with a single 1, exactly that model's.

        Computed in the module's dtype, tensor by tensor, as W₀ + Σ cᵢ (Wᵢ − W₀): equal weights stay as they are.
        """
        parts = [(model, c) for model, c in zip(self.models, coefficients, strict=True) if c != 0.0]
        (first, _), rest = parts[0], parts[1:]
        with torch.no_grad():
            for name, weight in self.weights.items():
                start = first[name]
                if not weight.is_floating_point() and not counts_batches(name):
                    _same_integers(name, start, [model[name] for model, _ in rest])
                if not weight.is_floating_point() or not rest:
                    weight.copy_(start)
                    continue
                start = start.to(weight)
                (second, c), *more = rest
                torch.lerp(start, second[name].to(weight), c, out=weight)
                for model, c in more:
                    weight.add_(model[name].to(weight) - start, alpha=c)
        return self.module

    def gram(self) -> Tensor:
        """⟨Wᵢ − W₀, Wⱼ − W₀⟩ for i, j ≥ 1, summed in float64 over all weights; [models − 1, models − 1]."""
        count = len(self.models) - 1
        total = torch.zeros(count, count, dtype=torch.float64)
        for name, weight in self.weights.items():
            if weight.is_floating_point():
                start = self.models[0][name].double()
                steps = [model[name].to(start) - start for model in self.models[1:]]
                for i, j in itertools.combinations_with_replacement(range(count), 2):
                    total[i, j] += steps[i].flatten() @ steps[j].flatten()
        return total + total.triu(1).T


def open_space(
    sources: Sequence[Checkpoint | nn.Module],
    names: Sequence[str],
    loss: Loss,
    scratch: Path,
    build: Build | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> WeightSpace:
    """The space of folders, open checkpoints and live modules (which are not touched).

    The module is made by `build` from the last source. Without `build` it is a copy of a live source if there is one,
    else of the class that the task needs, else of the one that the config names. It has `dtype`, and is on the device,
    by default that on which it is made. Models whose tensors are computed (aligned, merged) are computed once, into
    files in `scratch`, in `dtype` or float32 if that is wider: they are not rounded to the dtype in which `save` would
    write them. IncompatibleError if the models differ in more than their weights, so that one module cannot compute all
    of them; with `build`, only the weights of live modules are compared.
    """
    modules = [source for source in sources if isinstance(source, nn.Module)]
    untied = iter(match_ties([source for source in sources if isinstance(source, Checkpoint)])[0])
    sources = [source if isinstance(source, nn.Module) else next(untied) for source in sources]
    labels = isinstance(loss, Task) and loss.auto.endswith("Classification")
    require_one_function(sources, names, bare=build is None, labels=labels)
    last = sources[-1]
    if build is not None:
        checkpoint = last if isinstance(last, Checkpoint) else open_checkpoint(last, config=module_config(last) or {})
        module = build(checkpoint)
        if not isinstance(module, nn.Module):
            raise OptionError(f"build gave {type(module).__name__}, expected a module (torch.nn.Module)")
        module = module.to(dtype)
    elif isinstance(last, nn.Module) or modules:
        module = copy.deepcopy(most_weights(modules)).to(dtype)
    else:
        module = build_module(last, dtype, loss.auto if isinstance(loss, Task) else None)
    if device is not None:
        module = module.to(require(device))
    models = [
        _in_memory(source, module, name)
        if isinstance(source, nn.Module)
        else _by_memory_name(source, module, scratch / str(i), torch.promote_types(dtype, torch.float32))
        for i, (source, name) in enumerate(zip(sources, names, strict=True))
    ]
    for model, name in zip(models, names, strict=True):
        require_equal_ties(module, model, name)
    return WeightSpace(module.eval().requires_grad_(False), models, names)


def name_of(source: Checkpoint | nn.Module) -> str:
    return source.name if isinstance(source, Checkpoint) else type(source).__name__


def evaluate(
    source: Checkpoint | nn.Module,
    loss: Loss,
    *,
    build: Build | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> Score:
    """The score of one model. build, dtype, device: as in `open_space`."""
    with tempfile.TemporaryDirectory(prefix="symfuse-") as scratch:
        space = open_space([source], [name_of(source)], loss, Path(scratch), build, dtype, device)
        return measure(loss, space.set([1.0]))


def _in_memory(source: nn.Module, module: nn.Module, name: str) -> Mapping[str, Tensor]:
    """The weights of a live module, by name."""
    weights = dict(source.state_dict())
    require_read(module, weights.keys(), module.state_dict().keys(), name)
    return weights


def _by_memory_name(
    checkpoint: Checkpoint, module: nn.Module, scratch: Path, wide: torch.dtype
) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint by the module's names, from files; computed ones are stored in `wide`."""
    if not checkpoint.at_hand:
        checkpoint = open_checkpoint(checkpoint.to(wide).save(scratch), name=checkpoint.name)
    for name in checkpoint:
        checkpoint.read(name)  # checks that all is finite
    checkpoint = as_declared(checkpoint)
    disk = {ours: theirs for theirs, ours in names_in_memory(module).items()}
    names = {
        name: _on_disk(disk.get(name, name), checkpoint, module) or _on_disk(name, checkpoint, module)
        for name in module.state_dict()
    }
    stored = {ours: theirs for ours, theirs in names.items() if theirs is not None}
    tensors = Rewritten(checkpoint, {ours: _single(checkpoint, theirs) for ours, theirs in stored.items()})
    declared = is_declared(checkpoint.config) or not hasattr(module, "base_model_prefix")
    if declared or all(name in tensors for name, _ in module.named_parameters()):
        require_read(module, list(checkpoint), set(stored.values()), checkpoint.name)
        return tensors  # what is missing is reported by name
    return dict(live(checkpoint, wide, type(module)).state_dict())  # names that transformers converts


def _single(checkpoint: Checkpoint, name: str) -> str | Rule:
    """A tensor of half precision in float32, any other as it is."""
    info = checkpoint.info(name)
    half = info.dtype.is_floating_point and info.dtype.itemsize < 4
    return Rule(replace(info, dtype=torch.float32), partial(checkpoint.__getitem__, name)) if half else name


def _on_disk(name: str, checkpoint: Checkpoint, module: nn.Module) -> str | None:
    """The name in the file of a weight of the module: the prefix of the base model may be missing, or superfluous."""
    prefix, old = class_prefix(module), modern(name, {new: old for old, new in LEGACY.items()})
    return spelt(name, prefix, checkpoint) or spelt(old, prefix, checkpoint)


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _require(weights: Mapping[str, Tensor], model: Mapping[str, Tensor], name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if missing := [weight for weight in weights if weight not in model]:
        raise IncompatibleError(
            f"{name}: a {kind} has weights that this model lacks: {some(missing)}; evaluate it on a task that its head "
            "is made for, or take the checkpoint that has this head"
        )
    for weight, tensor in weights.items():
        if tuple(model[weight].shape) != tuple(tensor.shape):
            raise IncompatibleError(
                f"{name}: {weight} has shape {tuple(model[weight].shape)}, expected {tuple(tensor.shape)} as in "
                "the other model; between different shapes there is no path"
            )


def _same_integers(name: str, first: Tensor, others: Sequence[Tensor]) -> None:
    if not all(torch.equal(first, other) for other in others):
        raise CheckpointError(f"{name} holds integers that differ between the models; they cannot be interpolated")


def require_one_function(
    sources: Sequence[Checkpoint | nn.Module], names: Sequence[str], *, bare: bool, labels: bool
) -> None:
    """IncompatibleError if the models differ in more than their weights: in settings of their configs that change the
    function, or, if `bare` (live modules without configs), in a submodule or one of its settings. labels: whether the
    order of the labels counts too."""
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
