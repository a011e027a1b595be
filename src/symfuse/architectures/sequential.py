"""Chains of torch's own layers (`torch.nn.Sequential`): multilayer perceptrons, and plain convolutional networks such
as VGG (Simonyan & Zisserman 2015), also by torchvision's names. The config lists the layers, with their arguments.

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

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.resnet import batch_norm, reordered
from symfuse.errors import SpecError
from symfuse.groups import Group, Invertible, Permutation, PositiveMonomial, Signed, SignedMonomial, subgroups
from symfuse.io.live import CONFIGS, CONFIGS_BY_SHAPES, Shapes, shapes_of
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
UNSAID = ("device", "dtype", "inplace", "momentum", "p")
KINDS = (*MAPS, *NORMS, *COMMUTES)
Named = tuple[str, Any]  # a layer, a module, by the name of its tensors


def leaves(net: nn.Module, at: str = "") -> Iterator[Named]:
    """The layers of chains in chains, in their order; one that is called twice, twice."""
    for name, layer in net._modules.items():
        if isinstance(layer, nn.Sequential):
            yield from leaves(layer, f"{at}{name}.")
        elif layer is not None:
            yield at + name, layer


def entry(name: str, layer: nn.Module) -> dict[str, Any]:
    """A layer in the config, with what it is made with, but for what is usual, or has a meaning in training only."""
    kind = type(layer).__name__
    out = {"name": name, "type": kind}
    for key, parameter in inspect.signature(getattr(nn, kind)).parameters.items():
        if key in UNSAID or not hasattr(layer, key):
            continue
        value: Any = getattr(layer, key)
        value = value is not None if key == "bias" else list(value) if isinstance(value, tuple) else value
        value = value[0] if isinstance(value, list) and len(set(value)) == 1 else value  # a square is a side
        out |= {key: value} if value != parameter.default else {}
    return out


def build(config: Mapping[str, Any]) -> nn.Module:
    """The live network of a config, without its weights; SpecError for a layer that is none."""
    net, rates = nn.Sequential(), config.get("dropout") or {}
    for one in config.get("layers", ()):
        if not isinstance(one, Mapping) or one.get("type") not in KINDS or not isinstance(one.get("name"), str):
            raise SpecError(
                f"config.json: layers has {str(one)[:60]!r}, expected a name and a type of {', '.join(KINDS)}"
            )
        at: Any = net
        *path, leaf = one["name"].split(".")
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}
        try:
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Sequential())
                at = at._modules[part]
            given = {key: value for key, value in given.items() if key not in ("name", "type")}
            given |= {"p": rates[one["name"]]} if one["name"] in rates else {}
            at.add_module(leaf, getattr(nn, one["type"])(**given))
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
    start: Group = Invertible() if not norms else SignedMonomial() if gained else Permutation()
    return reduce(_meet, (COMMUTES[_kind(layer)] for layer in rest[max(norms, default=-1) + 1 :]), start)


def _norms(layers: Sequence[Named], axis: str) -> dict[str, str]:
    """The tensors of the norms among some layers: only behind the last one units are rescaled."""
    norms = [one for one in layers if _kind(one) in NORMS]
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
            raise SpecError(
                f"config.json: layer {name!r}: a {kind} behind {'vectors' if flat else 'images'} is not declared"
            )
        flat = flat or (isinstance(one, nn.Flatten) and (one.start_dim, one.end_dim) == (1, -1))
    size, units = layer[1].weight.shape[1], before[1].weight.shape[0]
    if size % units or (size > units and _kind(before) == _kind(layer)):
        raise SpecError(f"config.json: layer {layer[0]!r} reads {size} units, and {before[0]!r} writes {units}")
    return f"({axis}* {size // units})" if size > units else f"{axis}*"


with torch.device("meta"):
    _USUAL = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(2048, 256), nn.Tanh(), nn.Linear(256, 10),
    )  # fmt: skip
EXAMPLE = {"layers": [entry(*layer) for layer in leaves(_USUAL)]}


def _vgg(shapes: Shapes) -> nn.Module | None:
    """VGG by torchvision's names, in which layers without weights leave gaps; None for another network."""
    places = [i for i in range(99) if len(shapes.get(f"features.{i}.weight", ())) == 4]
    maps = [shapes.get(f"classifier.{i}.weight", ()) for i in (0, 3, 6)]
    if not places or any(len(shape) != 2 for shape in maps) or not all(all(shapes[name]) for name in shapes):
        return None
    features: list[nn.Module] = []
    for i, following in pairwise([*places, 99]):
        channels, read, kernel, _ = shapes[f"features.{i}.weight"]
        features.append(nn.Conv2d(read, channels, kernel, padding=1))
        features += [nn.BatchNorm2d(channels)] if f"features.{i + 1}.running_mean" in shapes else []
        features += [nn.ReLU(), nn.MaxPool2d(2)] if following > len(features) + 1 else [nn.ReLU()]
    pool = nn.AdaptiveAvgPool2d(math.isqrt(maps[0][1] // channels))
    classifier = [layer for out, read in maps for layer in (nn.Linear(read, out), nn.ReLU(), nn.Dropout())][:-2]
    parts = {"features": nn.Sequential(*features), "avgpool": pool, "classifier": nn.Sequential(*classifier)}
    return nn.Sequential(OrderedDict(parts))


def config_of(module: nn.Module) -> dict[str, Any] | None:
    """The config of a live chain, or of a VGG of torchvision's names; None for another module."""
    parts: dict[str, Any] = dict(module.named_children())
    if parts.keys() == {"features", "avgpool", "classifier"}:
        classifier = parts.pop("classifier")
        module = nn.Sequential(OrderedDict({**parts, "flatten": nn.Flatten(), "classifier": classifier}))
    if not isinstance(module, nn.Sequential) or not all(_kind(layer) in KINDS for layer in leaves(module)):
        return None
    rates = {name: layer.p for name, layer in leaves(module) if hasattr(layer, "p")}
    layers = [entry(*layer) for layer in leaves(module)]
    return {"model_type": "torch_sequential", "layers": layers} | ({"dropout": rates} if rates else {})


def config_by_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """The config of a VGG with torchvision's names and these shapes; None for another network."""
    with torch.device("meta"):
        net = _vgg(shapes)
    return None if net is None or shapes_of(net) != shapes else config_of(net)


CONFIGS.append(config_of)
CONFIGS_BY_SHAPES.append(config_by_shapes)


@architecture("torch_sequential", build=build, example=EXAMPLE)
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
