"""The settings of each layer in a config: written for layers that are cut, repeated or reordered, and compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from symfuse.architectures.base import LAYERS
from symfuse.errors import CheckpointError, IncompatibleError
from symfuse.io import Checkpoint
from symfuse.io.installed import resolved
from symfuse.modules import skeleton

# Fields by which every n-th layer is of one kind, and the list with the numbers of the other layers.
STRIDES = {"decoder_sparse_step": "mlp_only_layers"}
# Fields with the number of first layers that are of another kind.
FIRST = ("first_k_dense_replace", "num_dense_layers")
# Fields with the same content as a list by layer, in another form: groups of kinds with a count.
GROUPED = {"attention_types": "attention_layers"}
# Fields that may list something of each layer, whose names do not say so, and the parts whose layers they are.
BY_LAYER = {"attention_window": ("", "encoder")}
# Objects with the settings of a layer under its number.
BY_NUMBER = ("per_layer_config",)
# Objects with lists of numbers of layers, counted from one.
FROM_ONE = {"linear_attn_config": ("full_attn_layers", "kda_layers")}
# Fields by which a layer computes with its own number.
NUMBERED = ("scale_attn_by_inverse_layer_idx",)

NUMBERS = re.compile(
    r"^(?!out_).*(layers|idxs?|indices|indexes|layer_ids)$"
)  # lists that may contain numbers of layers
IMPLIED = re.compile(
    r"types|step|interval|pattern|every|freq|period|offset|first_k|window_layers|stride|shared_layers|dense"
)
OWN_NUMBER = re.compile(
    r"(layer|block)_?(idx|id|index|number|num)"
)  # attributes that differ whatever the layer computes
FRONT = re.compile(r"conv_layers$|parametrizations")  # no layers: the convolutions before those of speech encoders
UNUSED = re.compile(
    r"drop|relative_attention_bias|rel_attn_embed"
)  # in evaluation; and the table that the first layer holds for all layers

SHARED = "num_kv_shared_layers"  # the number of last layers that read keys and values of others
STORES = "store_full_length_kv"  # of layers whose keys and values these read: nothing does where there are none


class Layer(NamedTuple):
    """A layer of a model: its number, and the number of layers."""

    checkpoint: Checkpoint
    number: int
    depth: int


@dataclass(frozen=True)
class Stack:
    """A list of layers of the output. parts: the parts of the model that have lists of their own; part: the name of
    this one, or "". path, count: the object of config.json, and its field that holds the number of layers. layers: for
    each output layer the layers that it is made of, first the one that its tensors are named after."""

    layers: tuple[tuple[Layer, ...], ...]
    count: str
    path: tuple[str, ...] = ()
    part: str = ""
    parts: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether a layer has another number than in its model, or the number of layers differs."""
        return any(
            layer.number != at or layer.depth != len(self.layers)
            for at, layers in enumerate(self.layers)
            for layer in layers
        )


@dataclass(frozen=True)
class _LayerSettings:
    """The settings of layers in a config. own: the object that contains them; full: with the class's defaults for
    absent fields. by_layer: fields that have a value for each layer; numbers: fields that list numbers of layers.
    follows: fields that follow from the number of layers where they are absent; counts: absent fields whose default is
    the number of layers."""

    own: Mapping[str, Any]
    full: Mapping[str, Any]
    by_layer: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    follows: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    def rule(self, number: int) -> dict[str, Any]:
        """The settings of one layer."""
        listed = (name for name, values in self.numbers.items() if number in values and name not in STRIDES.values())
        return {name: values[number] for name, values in self.by_layer.items()} | dict.fromkeys(listed, True)


def rearranged(config: Mapping[str, Any], stack: Stack) -> dict[str, Any]:
    """The config of these layers: each has the settings that it has in the config of its own model."""
    sources = {id(layer.checkpoint): layer for layer, *_ in stack.layers}
    configs = {key: _layer_settings(layer.checkpoint.config, stack, layer.depth) for key, layer in sources.items()}
    firsts = [(configs[id(layer.checkpoint)], layer.number) for layer, *_ in stack.layers]
    first = firsts[0][0]
    new = {key: value for key, value in inside(config, stack.path).items() if key not in first.follows}
    new |= {key: value for key, value in first.counts.items() if key != stack.count}
    for name in first.by_layer:
        if all(name in one.by_layer for one, _ in firsts):
            new[name] = [one.by_layer[name][number] for one, number in firsts]
    for name in {name for one, _ in firsts for name in one.numbers}:
        new[name] = [at for at, (one, number) in enumerate(firsts) if number in one.numbers.get(name, ())]
    for step, listed in STRIDES.items():
        if any(_step(one.full, step) != 1 for one, _ in firsts):
            new[listed] = [at for at, (one, number) in enumerate(firsts) if _passed_over(one, number, step, listed)]
            new[step] = 1
    for name in FIRST:
        if new.get(name):
            new[name] = sum(number < one.full.get(name, 0) for one, number in firsts)
    for name, listed in GROUPED.items():
        if name in new and listed in new:
            new[name] = [[[kind], 1] for kind in new[listed]]
    new |= dict(_numbered(new, firsts))
    return with_inside(config, stack.path, new | {stack.count: len(stack.layers)})


def _numbered(config: Mapping[str, Any], firsts: Sequence[tuple[_LayerSettings, int]]) -> Iterator[tuple[str, Any]]:
    """The objects of a config in which layers have numbers, for these layers."""
    for name in (name for name in BY_NUMBER if config.get(name)):
        settings = [(one.full.get(name) or {}).get(str(number)) for one, number in firsts]
        yield name, {str(at): one for at, one in enumerate(settings) if one is not None}
    for name in (name for name in FROM_ONE if config.get(name)):
        kinds = [key for key in FROM_ONE[name] if key in config[name]]
        are = {key: [number + 1 in inside(one.full, [name]).get(key, ()) for one, number in firsts] for key in kinds}
        yield name, {**config[name], **{key: [at for at, is_in in enumerate(are[key], 1) if is_in] for key in kinds}}


def _step(full: Mapping[str, Any], name: str) -> int:
    value = full.get(name)
    return value if type(value) is int and value > 0 else 1


def _passed_over(config: _LayerSettings, number: int, step: str, listed: str) -> bool:
    return number in (config.full.get(listed) or ()) or (number + 1) % _step(config.full, step) != 0


def inside(config: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    """The object at that path of a config; empty if it does not exist."""
    for step in path:
        config = config[step] if isinstance(config.get(step), Mapping) else {}
    return config


def with_inside(config: Mapping[str, Any], path: Sequence[str], new: Mapping[str, Any]) -> dict[str, Any]:
    """The config with another object at that path."""
    if not path:
        return dict(new)
    return {**config, path[0]: with_inside(config.get(path[0], {}), path[1:], new)}


def _layer_settings(config: Mapping[str, Any], stack: Stack, depth: int) -> _LayerSettings:
    own, known = inside(config, stack.path), resolved(config)
    if known is None:
        return _LayerSettings(own, own, {name: v for name, v in own.items() if isinstance(v, list) and len(v) == depth})
    full = inside(known, stack.path)
    same, deeper = (_without(config, stack, count, list) for count in (depth, depth + 1))
    lists = {name: value for name, value in full.items() if isinstance(value, list)}
    numbers = {n: v for n, v in lists.items() if NUMBERS.search(n) and _are_numbers(v, deeper.get(n), depth)}
    left = {name: value for name, value in lists.items() if name not in numbers}
    by_layer = {n: v for n, v in left.items() if len(v) == depth and _length(deeper.get(n)) == depth + 1}
    follows = {n for n, v in left.items() if n not in by_layer and same.get(n) == v != deeper.get(n)}
    # What no config without it has: of models as deep as real ones are, no other list has that length.
    others = {name: value for name, value in left.items() if name not in by_layer and name not in follows}
    alone = {n: v for n, v in others.items() if len(v) == depth and _may_be_by_layer(n, depth, stack)}
    bare, deeper_bare = (_without(config, stack, count, list, int) for count in (depth, depth + 1))
    follows |= {
        n for n, v in own.items() if type(v) is int and n not in LAYERS and bare.get(n) == v != deeper_bare.get(n)
    }
    absent = {name: value for name, value in full.items() if type(value) is int and name not in own}
    counts = {n: v for n, v in absent.items() if n in same and n in deeper and same[n] != deeper[n]}
    return _LayerSettings(own, full, by_layer | alone, numbers, tuple(follows), counts)


def _may_be_by_layer(name: str, depth: int, stack: Stack) -> bool:
    return stack.part in BY_LAYER[name] if name in BY_LAYER else "layer" in name or depth > 8


def _without(config: Mapping[str, Any], stack: Stack, count: int, *kinds: type) -> Mapping[str, Any]:
    """The resolved config for that number of layers, without fields whose values have these types; empty if its class
    refuses it."""
    own = {name: value for name, value in inside(config, stack.path).items() if type(value) not in kinds}
    own |= {name: {k: v for k, v in own[name].items() if k not in FROM_ONE[name]} for name in FROM_ONE if own.get(name)}
    own = {name: value for name, value in own.items() if name not in BY_NUMBER}
    return inside(resolved(with_inside(config, stack.path, own | {stack.count: count})) or {}, stack.path)


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, list) else None


def _are_numbers(values: Sequence[Any], deeper: object, depth: int) -> bool:
    """Whether these may be numbers of layers, ascending. deeper: the class's list for a model with one more layer,
    which distinguishes numbers of all layers from a list of zeros and ones."""
    if not (values and all(type(value) is int and 0 <= value < depth for value in values)):
        return False
    usual = deeper if isinstance(deeper, list) else []
    return all(sorted(set(numbers)) == list(numbers) for numbers in (values, usual))


def require_same_rules(config: Mapping[str, Any], stacks: Sequence[Stack]) -> None:
    """IncompatibleError if a layer of a config would not compute as the layers that it is made of, judged by the
    modules of the real class and the settings of each layer. Families whose class is not installed are accepted."""
    for stack in stacks:
        if stack.changed:
            _require_same_rules(Checkpoint({}, config, name="the output"), stack)


def _require_same_rules(output: Checkpoint, stack: Stack) -> None:
    known: dict[int, list[dict[str, Any]] | None] = {}
    sources = {id(layer.checkpoint): layer for layers in stack.layers for layer in layers}
    try:
        for key, layer in sources.items():
            known[key] = _rules(layer.checkpoint, stack, layer.depth)
    except CheckpointError:  # a class that cannot be built here
        return
    if any(rules is None for rules in known.values()):
        return
    try:
        made = _rules(output, stack, len(stack.layers))
    except CheckpointError as error:
        raise IncompatibleError(f"config.json cannot say of these layers what they are: {error}") from error
    for at, layers in enumerate(stack.layers):
        for layer in layers:
            ours, theirs = (made or [])[at], (known[id(layer.checkpoint)] or [])[layer.number]
            differ = next((key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key)), None)
            numbered = [n for n in NUMBERED if inside(output.config, stack.path).get(n) and at != layer.number]
            if differ is not None or numbered:
                raise IncompatibleError(_difference(stack, at, layer, differ or numbered[0], ours, theirs))


def _difference(
    stack: Stack, at: int, layer: Layer, key: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> str:
    settings = inside(layer.checkpoint.config, stack.path)
    fields = [
        f"{name}: {settings[name]}" for name in settings if name == key or (IMPLIED.search(name) and settings[name])
    ]
    actual, expected = ours.get(key, "absent"), theirs.get(key, "absent")
    values = f"{key} is {actual}, expected {expected}" if actual != expected else f"{key} uses the number of a layer"
    in_config = f" (it has {', '.join(fields)})" if fields else ""
    return (
        f"layer {at} of the output{f' ({stack.part})' if stack.part else ''} would not compute as layer {layer.number} "
        f"of {layer.checkpoint.name}: {values}; no field of config.json can give it to that layer{in_config}. Choose "
        "layers that keep their kind at their new place (layer_range)"
    )


def _rules(checkpoint: Checkpoint, stack: Stack, depth: int) -> list[dict[str, Any]] | None:
    """All settings that decide how each layer computes; None if the class is not installed."""
    module = skeleton(checkpoint)
    if module is None:
        return None
    config = _layer_settings(checkpoint.config, stack, depth)
    rules = [config.rule(number) for number in range(depth)]
    shares = bool(config.full.get(SHARED))
    for where, layers in enumerate(_lists(module, stack, depth)):
        for rule, layer in zip(rules, layers, strict=True):
            facts = {f"{where}.{key}".removeprefix("0."): value for key, value in _facts(layer)}
            rule.update({key: value for key, value in facts.items() if shares or not key.endswith(STORES)})
    return rules


def _lists(module: nn.Module, stack: Stack, depth: int) -> list[nn.ModuleList]:
    """The lists with that many layers that are not inside another one; a list of rotary tables is none of layers."""
    lists: dict[str, nn.ModuleList] = {}
    for name, part in module.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in lists) or FRONT.search(name)
        layers = isinstance(part, nn.ModuleList) and len(part) == depth and next(part.parameters(), None) is not None
        if layers and not inner and _is_in(name, stack):
            lists[name] = part
    return list(lists.values())


def _is_in(name: str, stack: Stack) -> bool:
    places = {part: at for part in stack.parts if (at := f".{name}.".find(f".{part}.")) >= 0}
    return not stack.part or (bool(places) and min(places, key=lambda part: places[part]) == stack.part)


def _facts(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of a layer, their numbers and strings, and the shapes of their parameters."""
    for name, part in layer.named_modules():
        if UNUSED.search(name):
            continue
        at = f"{name}." if name else ""
        yield f"{at}class", type(part).__name__
        for key, value in vars(part).items():
            plain = isinstance(value, bool | int | float | str | None)
            if plain and not key.startswith("_") and not OWN_NUMBER.fullmatch(key) and not UNUSED.search(key):
                yield at + key, value
        for key, parameter in part.named_parameters(recurse=False):
            yield at + key, tuple(parameter.shape)
