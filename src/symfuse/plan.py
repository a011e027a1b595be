"""From a recipe and its models to the merged checkpoint, which is computed when it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from symfuse.architectures import Model
from symfuse.architectures.config import text_config
from symfuse.architectures.undeclared import LAYER_COUNTS
from symfuse.errors import IncompatibleError, OptionError
from symfuse.io import Checkpoint
from symfuse.merging import Merged, Method, Output, Parameter, Slice, Term, lookup, merge_slices
from symfuse.merging.engine import describe
from symfuse.merging.models import head_model, require_same_heads
from symfuse.recipe import Input, ModelRef, Module, Recipe, settings_for
from symfuse.recipe import Slice as RecipeSlice


@dataclass(frozen=True)
class _Part:
    """A slice of the recipe with all its inputs, the base among them if the method takes one."""

    module: Module | None
    slice: RecipeSlice | None
    inputs: tuple[Input, ...]
    base: ModelRef | None


def plan_recipe(
    recipe: Recipe,
    models: Mapping[ModelRef, Model],
    kept: Mapping[str, tuple[Checkpoint, str]] | None = None,
    *,
    device: str = "cpu",
) -> Checkpoint:
    """The merged checkpoint of a recipe. models: by reference, all that it names, aligned and in one vocabulary.
    kept: tensors that some models only have, to be added as they are: by name, the checkpoint and the name there.

    Raises OptionError for layer ranges, numbers of models and parameters that do not fit, IncompatibleError for
    models that do not fit each other; no tensor is read.
    """
    method = lookup(recipe.merge_method)
    order = list(models)
    opened = [models[ref] for ref in order]
    of_head = head_model(recipe.heads, opened)
    template = order.index(template_of(recipe)) if of_head is None else of_head
    spec = opened[template].spec
    if recipe.heads == "average":
        require_same_heads(opened)
    copy = frozenset() if of_head is None else spec.heads
    dropped = spec.heads if recipe.heads == "drop" else frozenset()
    dtype = _dtype(recipe)
    outputs: dict[str, Output] = {}
    layers: list[tuple[Model, int]] | None = None
    for names, parts in _modules(recipe, method, opened[template]):
        slices = [_slice(recipe, part, order, opened) for part in parts]
        if any(part.slice is not None for part in parts):
            layers = [(opened[s.models[0]], s.starts[0] + i) for s in slices for i in range(s.length)]
        skip = dropped if names is None else dropped | (spec.tensors.keys() - names)
        outputs |= merge_slices(opened, method, slices, template=template, dtype=dtype, skip=frozenset(skip), copy=copy)
    for name, (owner, file) in (kept or {}).items():
        outputs[name] = Output(owner.info(file), (Term(owner, file),))
    merged = Merged(outputs, seed=recipe.seed, device=device)
    checkpoint = opened[template].checkpoint
    config = _config(checkpoint.config, merged, layers, heads_dropped=recipe.heads == "drop")
    title = recipe.name or describe(outputs)
    sources = [folder for model in opened for folder in model.checkpoint.sources]
    return checkpoint.replace(tensors=merged, infos=merged.infos, config=config, name=title, sources=sources)


def template_of(recipe: Recipe) -> ModelRef:
    """The model that gives config, names, dtypes and tokenizer: the base model, or else the first."""
    return recipe.base_model or recipe.models_used()[0]


def _modules(recipe: Recipe, method: Method, template: Model) -> Iterator[tuple[set[str] | None, list[_Part]]]:
    """Each module of the recipe: the canonical names of its tensors (None: all), and its slices."""
    if not recipe.modules:
        yield None, list(_parts(recipe, method, None, recipe.models, recipe.slices))
        return
    left = dict.fromkeys(template.spec.tensors)
    for name, module in recipe.modules.items():
        whole = len(recipe.modules) == 1 and name == "default"
        names = {n for n in left if whole or _in_module(template.spec.file_name(n), name)}
        if not names:
            prefixes = sorted({template.spec.file_name(n).partition(".")[0] for n in left})
            raise OptionError(f"modules.{name}: no tensor's name has that part; the parts are {', '.join(prefixes)}")
        for n in names:
            del left[n]
        yield names, list(_parts(recipe, method, module, module.models, module.slices))
    if left:
        raise OptionError(f"modules: {len(left)} tensors are in none of them, such as {next(iter(left))}")


def _in_module(file: str, module: str) -> bool:
    return file.startswith(module + ".") or f".{module}." in file


def _parts(
    recipe: Recipe,
    method: Method,
    module: Module | None,
    models: Sequence[Input],
    slices: Sequence[RecipeSlice],
) -> Iterator[_Part]:
    every: Sequence[RecipeSlice | None] = slices or [None]
    for part in every:
        inputs = tuple(models if part is None else part.sources)
        base = (None if part is None else part.base_model) or recipe.base_model
        if base is not None and base not in [given.model for given in inputs]:
            if method.base == "unused":
                raise OptionError(
                    f"{method.name} has no use for base_model, and {base} is not among the models: list it with them "
                    "if it is one of those to be merged, or leave base_model out"
                )
            inputs = (*inputs, Input(model=base, parameters={}, layer_range=inputs[0].layer_range))
        yield _Part(module, part, inputs, base)


def _slice(recipe: Recipe, part: _Part, order: Sequence[ModelRef], models: Sequence[Model]) -> Slice:
    numbers = tuple(order.index(given.model) for given in part.inputs)
    ranges = [given.layer_range or (0, _depth(models[i])) for given, i in zip(part.inputs, numbers, strict=True)]
    for i, (start, stop) in zip(numbers, ranges, strict=True):
        if stop > _depth(models[i]):
            raise OptionError(
                f"layer_range [{start}, {stop}] of {models[i].name}, which has {_depth(models[i])} layers (0 to "
                f"{_depth(models[i]) - 1}; the end of a range is not part of it)"
            )
    lengths = {stop - start for start, stop in ranges}
    if len(lengths) > 1:
        found = ", ".join(f"{models[i].name} {b - a}" for i, (a, b) in zip(numbers, ranges, strict=True))
        raise IncompatibleError(f"the numbers of layers differ: {found}; give each as many (layer_range)")

    def resolve(parameter: Parameter, position: int | None, tensor: str, t: float) -> Any:
        source = None if position is None else part.inputs[position]
        for settings in settings_for(recipe, part.module, part.slice, source):
            if parameter.name in settings:
                value = settings[parameter.name].at(tensor, t)
                if value is not None:
                    return parameter.value(value, recipe.merge_method)
        return None

    base = None if part.base is None else [given.model for given in part.inputs].index(part.base)
    return Slice(numbers, tuple(start for start, _ in ranges), lengths.pop(), base, resolve)


def _depth(model: Model) -> int:
    return model.spec.axes["l"].size if "l" in model.spec.axes else 0


def _dtype(recipe: Recipe) -> torch.dtype | None:
    name = recipe.out_dtype or recipe.dtype
    return None if name is None else getattr(torch, name)


def _config(
    config: Mapping[str, Any], merged: Merged, layers: list[tuple[Model, int]] | None, *, heads_dropped: bool
) -> dict[str, Any]:
    """The template's config with what the merge changes: the number of layers, what is listed by layer, the dtype.

    layers: of which model each layer is, and its number there, if the recipe says that layer by layer.
    """
    out = dict(config)
    if heads_dropped:
        out.pop("architectures", None)  # the class with the head would fill it in at random
    if layers is not None:
        text = dict(out["text_config"]) if isinstance(out.get("text_config"), Mapping) else out
        for key, value in list(text.items()):
            lists = [text_config(model.checkpoint.config).get(key) for model, _ in layers]
            if isinstance(value, list) and all(
                isinstance(of_model, list) and len(of_model) == _depth(model)
                for (model, _), of_model in zip(layers, lists, strict=True)
            ):
                text[key] = [list(of_model or ())[i] for (_, i), of_model in zip(layers, lists, strict=True)]
        key = next((key for key in LAYER_COUNTS if key in text), LAYER_COUNTS[0])
        text[key] = len(layers)
        if text is not out:
            out["text_config"] = text
    sizes: Counter[torch.dtype] = Counter()
    for info in merged.infos.values():
        if info.dtype.is_floating_point:
            sizes[info.dtype] += info.nbytes
    if sizes:
        out["torch_dtype" if "torch_dtype" in out else "dtype"] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    return out
