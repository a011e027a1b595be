"""From a recipe and its models to the merged checkpoint, whose tensors are computed when they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from symfuse.device import CPU
from symfuse.errors import IncompatibleError, OptionError
from symfuse.io import Checkpoint
from symfuse.io.installed import resolved
from symfuse.merging import Merged, Method, Output, Parameter, Slice, Term, merge_slices
from symfuse.merging.engine import Learnt, typed
from symfuse.methods import lookup
from symfuse.methods.models import merged_checkpoint, require_same_heads, template_config
from symfuse.model import Model
from symfuse.model.config import with_fields
from symfuse.model.undeclared import LAYER, LAYER_COUNTS, OTHER_MODALITY, other_modality, serves_all
from symfuse.recipes.schema import Input, ModelRef, Module, Recipe, kept_head, matching, settings_for
from symfuse.recipes.schema import Slice as RecipeSlice
from symfuse.rewriting.names import Inside
from symfuse.rules import Layer, Stack, inside, rearranged, require_same_rules
from symfuse.spec import BEHIND, Spec, anatomy, layer_of

# mergekit's names of modules: patterns for families whose tensors have other names, and the object of config.json with
# the number of layers.
_TENSORS = {
    "text_decoder": re.compile(rf"\.(?!{OTHER_MODALITY.pattern}$)"),
    "vision_tower": re.compile(r"(\.model)?\.visual\.(?!merger|deepstack_merger)"),
    "multi_modal_projector": re.compile(r"(\.model)?\.visual\.(merger|deepstack_merger)"),
}
_CONFIGS = {
    "text_decoder": ("text_config", "llm_config"),
    **dict.fromkeys(("vision_tower", "vision_model", "visual"), ("vision_config",)),
    "multi_modal_projector": (),
}


@dataclass(frozen=True)
class _Inputs:
    """A slice of the recipe with all its inputs, including the base if the method has one."""

    slice: RecipeSlice | None
    inputs: tuple[Input, ...]
    base: ModelRef | None


@dataclass(frozen=True)
class _Part:
    """A module of the recipe, or all of it: its slices, and the canonical names of its tensors."""

    name: str
    module: Module | None
    slices: tuple[_Inputs, ...]
    names: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()  # all of the recipe
    declared: bool = True  # whether the index of a tensor says the layer of each module

    @property
    def by_layer(self) -> bool:
        return any(part.slice is not None for part in self.slices)

    def layer(self, spec: Spec, name: str) -> int | None:
        """The layer that a tensor is in: in a module with slices, the first number in its name."""
        if self.module is None or not self.by_layer:
            return layer_of(spec.tensors[name].index)
        if not self.has(spec, name):
            return None
        index, match = spec.tensors[name].index, LAYER.match(name)
        if self.declared or BEHIND in index or serves_all(name, spec.tensors):
            return layer_of(index)
        return int(match[2]) if match else None

    def has(self, spec: Spec, name: str) -> bool:
        """Whether a tensor belongs to the module: the first one in its name (`decoder.bert.encoder.layer.0`)."""
        places = {module: at for module in self.modules if (at := _place(module, f".{spec.file_name(name)}")) >= 0}
        return self.modules in ((), ("default",)) or (
            bool(places) and min(places, key=lambda m: places[m]) == self.name
        )

    def depth(self, spec: Spec) -> int:
        return max((at + 1 for name in spec.tensors if (at := self.layer(spec, name)) is not None), default=0)

    def stacks(self, spec: Spec) -> set[str]:
        """The lists of layers: their names up to the number."""
        layered = (name for name in spec.tensors if self.layer(spec, name) is not None)
        return {match[1] for name in layered if (match := LAYER.match(name))}


def _place(module: str, name: str) -> int:
    """The position of a module in the name of a tensor; -1 if it is not part of it."""
    if (at := name.find(f".{module}.")) >= 0 or module not in _TENSORS:
        return at
    match = _TENSORS[module].match(name)
    return -1 if match is None else match.start()


def plan_recipe(
    recipe: Recipe,
    models: Mapping[ModelRef, Model],
    kept: Mapping[str, tuple[Checkpoint, str]] | None = None,
    *,
    fields: Mapping[str, Any] | None = None,
    inside: Inside | None = None,
    before: Sequence[Checkpoint] = (),
    device: str = CPU,
    learned: Learnt | None = None,
) -> Checkpoint:
    """The merged checkpoint of a recipe; no tensor is read. models: all that the recipe names, by reference, aligned
    and in one vocabulary. kept: tensors of some models only, which are copied: by name, the checkpoint and the name
    there. fields: of config.json, which belong to these. inside: the multimodal model that the result is a part of.
    before: the models as they were opened, the template first.
    learned: what a method learned from data, by index of a model in `models`.

    Raises OptionError for layer ranges, numbers of models and parameters that do not fit; IncompatibleError for models
    that do not fit each other, and for an output that its class would not load, or run in another way.
    """
    method = lookup(recipe.merge_method)
    order = list(models)
    opened = [models[ref] for ref in order]
    with recipe.blaming("heads"):
        kept_head(recipe.heads, order)
    template = order.index(template_of(recipe))
    opened = [model.as_in(opened[template].spec) for model in opened]
    spec = opened[template].spec
    if recipe.heads == "average":
        require_same_heads(opened)
    copy = frozenset() if recipe.heads in ("average", "drop") else spec.heads
    dropped = spec.heads if recipe.heads == "drop" else frozenset()
    dtype = _dtype(recipe)
    outputs: dict[str, Output] = {}
    config = template_config(opened[template], recipe.heads)
    stacks: list[Stack] = []
    for part in _modules(recipe, method, opened[template]):
        slices = [_slice(recipe, part, inputs, order, opened) for inputs in part.slices]
        if part.by_layer:
            layers = [_layers(part, s, opened, template, i) for s in slices for i in range(s.length)]
            stack = _stack(config, part, opened[template], layers)
            stacks += [stack] if stack is not None and stack.changed else []
        skip = dropped | (spec.tensors.keys() - part.names)
        try:
            outputs |= merge_slices(
                opened,
                method,
                slices,
                template=template,
                dtype=dtype,
                skip=skip,
                copy=copy,
                layer=part.layer,
                learned=learned,
            )
        except OptionError as error:
            _refuse(recipe, method, error)
    if inside is not None:
        outputs = {inside.names[name]: output for name, output in outputs.items()}
    for name, (owner, file) in (kept or {}).items():
        outputs[name] = Output(typed(owner.info(file), dtype), (Term(owner, file),))
    merged = Merged(outputs, seed=recipe.seed, device=device)
    for stack in stacks:
        config = rearranged(config, stack)
    config = with_fields(config, fields or {})
    _require_no_parts_by_layer(spec, stacks)
    require_same_rules(config, stacks)
    config = config if inside is None else inside.config(config)
    return merged_checkpoint(opened, template, merged, config, recipe.name, before, kept or ())


def _require_no_parts_by_layer(spec: Spec, stacks: Sequence[Stack]) -> None:
    """IncompatibleError if layers are rearranged, and a tensor outside the layers has a part for each of them."""
    for name, declared in spec.tensors.items() if stacks else ():
        if any(anatomy(axis) == "l" for axis in declared.layout.names):
            raise IncompatibleError(
                f"{spec.file_name(name)} has a part for each layer, and cannot be made for another order or number of "
                "layers: choose all layers, each at its place (layer_range)"
            )


def _layers(part: _Part, piece: Slice, models: Sequence[Model], template: int, at: int) -> tuple[Layer, ...]:
    """The layers from which one layer of the output is merged, that of the template first."""
    order = sorted(range(len(piece.models)), key=lambda i: piece.models[i] != template)
    sources = [(models[piece.models[i]], piece.starts[i] + at) for i in order]
    return tuple(Layer(model.checkpoint, number, part.depth(model.spec)) for model, number in sources)


def _refuse(recipe: Recipe, method: Method, error: OptionError) -> NoReturn:
    """Raise the error with the lines of the parameters that it names, or the line of the method."""
    names = [name for name in method.parameters if re.search(rf"\b{name}s?\b", str(error))]
    placed = [name for name in names if any(path.endswith(f".{name}") for path in recipe.places)]
    recipe.refuse(error, *(placed or ["merge_method"]))


def template_of(recipe: Recipe) -> ModelRef:
    """The model that gives config, names, dtypes and tokenizer: the base model, or the one whose head is kept, or else
    the first. OptionError if the first two differ."""
    listed = list(dict.fromkeys(entry.model for entry in recipe.inputs))
    if recipe.heads in ("average", "drop"):
        return recipe.base_model or listed[0]
    named = matching(recipe.heads, listed)
    of_head = listed[named[0]] if len(named) == 1 else recipe.base_model or listed[0]  # `kept_head` raises later
    if recipe.base_model not in (None, of_head):
        raise OptionError(
            f"base_model {recipe.base_model} and heads {recipe.heads}: the model whose head is kept gives the config, "
            "which names the class; leave base_model out, or name the same model"
        )
    return of_head


def why_template(recipe: Recipe) -> str:
    """Why `template_of` is that model, in words."""
    if recipe.base_model is not None:
        return "the base model"
    kept = recipe.heads not in ("average", "drop")
    return "whose head is kept" if kept else "the first model, as no base_model is given"


def _modules(recipe: Recipe, method: Method, template: Model) -> list[_Part]:
    """The modules of the recipe, or the whole model as one. OptionError for a module without tensors, and for layers in
    no module."""
    spec = template.spec
    if not recipe.modules:
        slices = _inputs(recipe, method, recipe.models, recipe.slices)
        return [_Part("", None, slices, frozenset(spec.tensors))]
    left = set(spec.tensors)
    parts = []
    for name, module in recipe.modules.items():
        inputs = _inputs(recipe, method, module.models, module.slices)
        part = _Part(name, module, inputs, modules=tuple(recipe.modules), declared=template.declared)
        names = {tensor for tensor in left if part.has(spec, tensor)}
        if not names:
            prefixes = sorted({spec.file_name(n).partition(".")[0] for n in left})
            raise OptionError(f"modules.{name}: no tensor's name has that part; the parts are {', '.join(prefixes)}")
        left -= names
        parts.append(replace(part, names=frozenset(names)))
    if layered := sorted(name for name in left if LAYER.match(name)):
        raise OptionError(f"modules: {len(layered)} tensors of layers are in none of them, such as {layered[0]}")
    # What modules share, such as embeddings, goes with the first.
    return [replace(parts[0], names=parts[0].names | left), *parts[1:]]


def _inputs(
    recipe: Recipe, method: Method, models: Sequence[Input], slices: Sequence[RecipeSlice]
) -> tuple[_Inputs, ...]:
    every: Sequence[RecipeSlice | None] = slices or [None]
    out = []
    for part in every:
        inputs = tuple(models if part is None else part.sources)
        base = (None if part is None else part.base_model) or recipe.base_model
        if method.base != "unused" and {entry.model for entry in inputs} == {base}:
            raise OptionError(f"{base} is the base and the only model, so there is nothing to merge; add another")
        if base is not None and base not in [entry.model for entry in inputs]:
            if method.base != "unused":
                inputs = (*inputs, Input(model=base, parameters={}, layer_range=inputs[0].layer_range))
            elif part is None:
                raise OptionError(
                    f"{method.name} does not use base_model, and {base} is not among the models: list it there to "
                    "merge it, or leave base_model out"
                )
            else:  # with slices it only gives the config
                base = None
        out.append(_Inputs(part, inputs, base))
    return tuple(out)


def require_layers(recipe: Recipe, models: Mapping[ModelRef, Model]) -> None:
    """OptionError for a layer range that ends after the last layer of its model."""
    for entry in recipe.inputs:
        model = models[entry.model]
        depth = max((int(match[2]) + 1 for name in model.spec.tensors if (match := LAYER.match(name))), default=0)
        with recipe.blaming("layer_range"):
            _require_depth(model, entry.layer_range, depth)


def _require_depth(model: Model, layers: tuple[int, int] | None, depth: int) -> None:
    if layers is not None and layers[1] > depth:
        raise OptionError(
            f"layer_range {list(layers)} of {model.name}, which has {depth} layers (0 to {depth - 1}; a range does not "
            "include its end)"
        )


def _slice(recipe: Recipe, module: _Part, part: _Inputs, order: Sequence[ModelRef], models: Sequence[Model]) -> Slice:
    numbers = tuple(order.index(entry.model) for entry in part.inputs)
    depths = {i: module.depth(models[i].spec) for i in numbers}
    ranges = [entry.layer_range or (0, depths[i]) for entry, i in zip(part.inputs, numbers, strict=True)]
    for i, layers in zip(numbers, ranges, strict=True):
        _require_depth(models[i], layers, depths[i])
    if part.slice is not None and len(stacks := module.stacks(models[numbers[0]].spec)) > 1:
        raise IncompatibleError(
            f"{models[numbers[0]].name} has several lists of layers ({', '.join(sorted(stacks))}): write `modules`, "
            "each with slices of its own"
        )
    lengths = {stop - start for start, stop in ranges}
    if len(lengths) > 1:
        counts = ", ".join(f"{models[i].name} {b - a}" for i, (a, b) in zip(numbers, ranges, strict=True))
        raise IncompatibleError(f"the numbers of layers differ: {counts}; choose equally many (layer_range)")

    def resolve(parameter: Parameter, position: int | None, tensor: str, t: float) -> Any:
        source = None if position is None else part.inputs[position]
        for settings in settings_for(recipe, module.module, part.slice, source):
            if parameter.name in settings:
                value = settings[parameter.name].at(tensor, t)
                if value is not None:
                    return parameter.value(value, recipe.merge_method)
        return None

    base = None if part.base is None else [entry.model for entry in part.inputs].index(part.base)
    return Slice(numbers, tuple(start for start, _ in ranges), lengths.pop(), base, resolve)


def _dtype(recipe: Recipe) -> torch.dtype | None:
    name = recipe.out_dtype or recipe.dtype
    return None if name is None else getattr(torch, name)


def _stack(
    config: Mapping[str, Any], part: _Part, template: Model, layers: Sequence[tuple[Layer, ...]]
) -> Stack | None:
    """The layers of a part, and the field of config.json with their number; None without a field, if none is needed.

    IncompatibleError if the depth of a module changes and config.json has no field for it.
    """
    path, key = _depth_field(config, part, template)
    if key is not None:
        return Stack(tuple(layers), key, path, "" if part.module is None else part.name, part.modules)
    if len(layers) != part.depth(template.spec):
        raise IncompatibleError(
            f"modules.{part.name}: config.json has no field for its number of layers; keep that number"
        )
    return None


def _depth_field(config: Mapping[str, Any], part: _Part, template: Model) -> tuple[tuple[str, ...], str | None]:
    """The objects and the field of config.json that hold the number of layers; None for the field if the class fixes
    it."""
    own = (part.name, f"{part.name}_config", f"{part.name.partition('_')[0]}_config") if part.module else ()
    text = () if other_modality(part.name) else _CONFIGS["text_decoder"]
    layered = [name for name in template.spec.tensors if LAYER.match(name)]
    alone = part.module is None and layered and all(map(other_modality, layered))  # of two parts the encoder of images
    steps = _CONFIGS["vision_tower"] if alone else _CONFIGS.get(part.name, (*own, *text))
    path = next(((step,) for step in steps if isinstance(config.get(step), Mapping)), ())
    if (key := _count_in(inside(config, path), part, template, path)) is None:
        key = _count_in(inside(resolved(config) or {}, path), part, template, path)
    several = part.module is not None and part.name != "text_decoder" and not path and _lists(template) > 1
    return path, key if key or path or several else LAYER_COUNTS[0]


def _count_in(fields: Mapping[str, Any], part: _Part, template: Model, path: Sequence[str]) -> str | None:
    """The field with the number of layers of a part, if there is one."""
    if part.module is not None and part.name != "text_decoder" and not path:
        for key in (f"{part.name}_layers", f"num_{part.name}_layers"):
            if key in fields:
                return key
        if _lists(template) > 1:  # the field may only mean the first
            return "num_layers" if part.name == "encoder" and "num_layers" in fields else None
    return next((key for key in (*LAYER_COUNTS, *(["depth"] if path else [])) if key in fields), None)


def _lists(template: Model) -> int:
    """The number of lists of layers of a model."""
    return len({match[1] for name in template.spec.tensors if (match := LAYER.match(name))})
