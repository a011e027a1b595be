"""Chains of torch's own layers (`torch.nn.Sequential`): multilayer perceptrons, and plain convolutional networks such as
VGG (Simonyan & Zisserman 2015), also by torchvision's names. The config lists the layers, with their arguments.

Behind each map the largest group acts that all layers up to the next one commute with. Norms have a gain and a bias for
each unit, which are rescaled; what is before them, and their statistics, is only reordered.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from symfuse.architectures.base import Config, Family, Shapes, architecture
from symfuse.architectures.resnet import batch_norm, reordered
from symfuse.errors import SpecError
from symfuse.groups import Group, Invertible, Permutation, PositiveMonomial, Signed, SignedMonomial, subgroups
from symfuse.spec import Axis

MAPS = ("Linear", "Conv1d", "Conv2d", "Conv3d")
NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm")
# By layer without weights the largest group that it commutes with.
COMMUTES: dict[str, Group] = {
    **dict.fromkeys(("Identity", "Flatten", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AvgPool1d", "AvgPool2d",
                     "AvgPool3d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d"), Invertible()),
    **dict.fromkeys(("ReLU", "LeakyReLU", "MaxPool1d", "MaxPool2d", "MaxPool3d", "AdaptiveMaxPool1d",
                     "AdaptiveMaxPool2d", "AdaptiveMaxPool3d"), PositiveMonomial()),
    **dict.fromkeys(("Tanh", "Softsign", "Tanhshrink", "Hardshrink", "Softshrink"), Signed()),
    **dict.fromkeys(("ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Sigmoid", "LogSigmoid", "Softplus", "ReLU6",
                     "Hardtanh", "Hardswish", "Hardsigmoid"), Permutation()),
}  # fmt: skip
KINDS = (*MAPS, *NORMS, *COMMUTES)
Named = tuple[str, nn.Module]  # a layer, by the name of its tensors


def leaves(net: nn.Module, at: str = "") -> Iterator[Named]:
    """The layers of chains in chains, in their order; one that is called twice, twice."""
    for name, layer in net._modules.items():
        if isinstance(layer, nn.Sequential):
            yield from leaves(layer, f"{at}{name}.")
        elif layer is not None:
            yield at + name, layer


def entry(name: str, layer: nn.Module) -> dict[str, Any]:
    """A layer in the config."""
    kind = type(layer).__name__
    arguments = {key: getattr(layer, key) for key in _parameters(kind) if hasattr(layer, key)}
    arguments |= {"bias": arguments["bias"] is not None} if "bias" in arguments else {}
    return {"name": name, "type": kind, **arguments}


def _parameters(kind: str) -> list[str]:
    """What a layer is made with, but for where it is."""
    return [key for key in inspect.signature(getattr(nn, kind)).parameters if key not in ("device", "dtype")]


def build(config: Mapping[str, Any]) -> nn.Module:
    """The live network of a config, without its weights; SpecError for a layer that is none."""
    net = nn.Sequential()
    for one in config.get("layers", ()):
        if not isinstance(one, Mapping) or one.get("type") not in KINDS or not isinstance(one.get("name"), str):
            raise SpecError(f"config.json: layers has {str(one)[:60]!r}, expected a name and a type of {', '.join(KINDS)}")
        at: Any = net
        *path, leaf = one["name"].split(".")
        arguments = {key: tuple(one[key]) if isinstance(one[key], list) else one[key] for key in one}
        try:
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Sequential())
                at = at._modules[part]
            kind = getattr(nn, arguments.pop("type"))
            at.add_module(leaf, kind(**{key: arguments[key] for key in arguments if key != "name"}))
        except Exception as error:  # whatever the classes raise for arguments that make no sense
            raise SpecError(f"config.json: layer {one['name']!r} is no {one['type']}: {error}") from error
    return net


def _meet(one: Group, other: Group) -> Group:
    """The largest group that is in both."""
    ours, theirs = subgroups(one), subgroups(other)
    return max((group for name, group in ours.items() if name in theirs), key=lambda group: len(subgroups(group)))


def _kind(layer: Named) -> str:
    return type(layer[1]).__name__


def _group(rest: Sequence[Named]) -> Group:
    """The largest group behind a map, by the layers up to the next one."""
    norms = [i for i, layer in enumerate(rest) if _kind(layer) in NORMS]
    gained = not norms or getattr(rest[norms[-1]][1], "weight", None) is not None
    start = Invertible() if not norms else SignedMonomial() if gained else Permutation()
    return reduce(_meet, (COMMUTES[_kind(layer)] for layer in rest[max(norms, default=-1) + 1 :]), start)


def _norms(layers: Sequence[Named], axis: str) -> dict[str, str]:
    """The tensors of the norms among some layers: only behind the last one units are rescaled."""
    norms = [(name, layer) for name, layer in layers if type(layer).__name__ in NORMS]
    out: dict[str, str] = {}
    for name, layer in norms:
        tensors = batch_norm(name, axis if layer is norms[-1][1] else reordered(axis))
        out |= {f"{name}.{end}": tensors[f"{name}.{end}"] for end in layer.state_dict()}
    return out


def _map(layer: Named, rest: Sequence[Named], axis: str, read: str) -> dict[str, str]:
    """The tensors of a map, and of the norms behind it."""
    (name, module), norms = layer, _norms(rest, axis)
    own, kernel = reordered(axis) if norms else axis, module.weight.shape[2:]
    tensors = {f"{name}.weight": " ".join(map(str, (own, read, *kernel))), f"{name}.bias": own}
    return {key: tensors[key] for key in tensors if key.removeprefix(f"{name}.") in module.state_dict()} | norms


def _read(layer: Named, before: Named, rest: Sequence[Named], axis: str) -> str:
    """How a map reads the one before: behind a flattening all pixels of a channel, one after the other. SpecError for
    layers that treat units or pixels as the other."""
    flat = _kind(before) == "Linear"
    for name, one in (*rest, layer):
        kind = type(one).__name__
        if flat != (kind in ("Linear", "LayerNorm")) and (kind in MAPS or "Pool" in kind or kind == "LayerNorm"):
            raise SpecError(f"config.json: layer {name!r}: a {kind} behind {'vectors' if flat else 'images'} is not declared")
        flat = flat or (isinstance(one, nn.Flatten) and (one.start_dim, one.end_dim) == (1, -1))
    size, units = layer[1].weight.shape[1], before[1].weight.shape[0]
    if size % units or (size > units and _kind(before) == _kind(layer)):
        raise SpecError(f"config.json: layer {layer[0]!r} reads {size} units, and {before[0]!r} writes {units}")
    return f"({axis}* {size // units})" if size > units else f"{axis}*"


EXAMPLE = {
    "layers": [
        {"name": "0", "type": "Conv2d", "in_channels": 3, "out_channels": 64, "kernel_size": 3},
        {"name": "1", "type": "BatchNorm2d", "num_features": 64},
        {"name": "2", "type": "ReLU"},
        {"name": "3", "type": "AdaptiveAvgPool2d", "output_size": 1},
        {"name": "4", "type": "Flatten"},
        {"name": "5", "type": "Linear", "in_features": 64, "out_features": 128},
        {"name": "6", "type": "Tanh"},
        {"name": "7", "type": "Linear", "in_features": 128, "out_features": 10},
    ]
}


def _vgg(shapes: Shapes) -> list[dict[str, Any]]:
    """The layers of VGG by torchvision's names, in which those without weights leave gaps."""
    layers: list[dict[str, Any]] = []
    convolutions = [i for i in range(99) if len(shapes.get(f"features.{i}.weight", ())) == 4]
    for i, following in pairwise([*convolutions, 99]):
        out, read, *kernel = shapes[f"features.{i}.weight"]
        arguments = {"in_channels": read, "out_channels": out, "kernel_size": kernel, "padding": 1}
        block = [{"type": "Conv2d", **arguments}]
        block += [{"type": "BatchNorm2d", "num_features": out}] if f"features.{i + 1}.running_mean" in shapes else []
        block += [{"type": "ReLU"}]
        block += [{"type": "MaxPool2d", "kernel_size": 2}] if following > i + len(block) else []
        layers += [{"name": f"features.{i + number}", **one} for number, one in enumerate(block)]
    side = math.isqrt(shapes["classifier.0.weight"][1] // out)
    layers += [{"name": "avgpool", "type": "AdaptiveAvgPool2d", "output_size": side}, {"name": "flatten", "type": "Flatten"}]
    for i, rest in ((0, ("ReLU", "Dropout")), (3, ("ReLU", "Dropout")), (6, ())):
        out, read = shapes[f"classifier.{i}.weight"]
        layers.append({"name": f"classifier.{i}", "type": "Linear", "in_features": read, "out_features": out})
        layers += [{"name": f"classifier.{i + n}", "type": kind} for n, kind in enumerate(rest, 1)]
    return layers


def recognise(shapes: Shapes, module: nn.Module | None) -> dict[str, Any] | None:
    """The config of a live chain, or of VGG by torchvision's names; None for another network."""
    layers: list[dict[str, Any]] = []
    if module is None and VGG <= shapes.keys():
        layers = _vgg(shapes)
    elif module is not None:
        parts = module._modules
        if set(parts) == {"features", "avgpool", "classifier"}:
            flat = {"features": parts["features"], "avgpool": parts["avgpool"], "flatten": nn.Flatten()}
            module = nn.Sequential(OrderedDict({**flat, "classifier": parts["classifier"]}))
        known = isinstance(module, nn.Sequential) and all(_kind(one) in KINDS for one in leaves(module))
        layers = [entry(*one) for one in leaves(module)] if known else []
    return {"model_type": "torch_sequential", "layers": layers} if layers else None


VGG = {f"{part}.weight" for part in ("features.0", "classifier.0", "classifier.3", "classifier.6")}


@architecture("torch_sequential", build=build, example=EXAMPLE, recognise=recognise)
def torch_sequential(c: Config) -> Family:
    with torch.device("meta"):
        layers = [*leaves(build({"layers": c.get("layers", [])}))]
    maps = [i for i, layer in enumerate(layers) if _kind(layer) in MAPS]
    if not maps:
        raise SpecError(f"config.json: none of the {len(layers)} layers is a map, one of {', '.join(MAPS)}")
    if grouped := [name for name, layer in layers if getattr(layer, "groups", 1) != 1]:
        raise SpecError(f"config.json: layer {grouped[0]!r} is a convolution in groups, which is not declared")
    inputs = layers[maps[0]][1].weight.shape[1]
    tensors, axes, read = _norms(layers[: maps[0]], str(inputs)), {"inputs": Axis(inputs)}, "inputs"
    for number, (start, stop) in enumerate(pairwise([*maps, len(layers)])):
        layer, rest, last = layers[start], layers[start + 1 : stop], stop == len(layers)
        axis = "outputs" if last else f"map{number}_{'ffn' if _kind(layer) == 'Linear' else 'stem'}"
        tensors |= _map(layer, rest, axis, read)
        axes[axis] = Axis(layer[1].weight.shape[0], None if last else _group(rest))
        read = "" if last else _read(layers[stop], layer, rest, axis)
    return Family(axes, tensors)
