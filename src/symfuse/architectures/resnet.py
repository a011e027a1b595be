"""ResNet (He et al. 2016), by torchvision's names (wide ones and ResNeXt too) and by those of `transformers`: stages of
blocks of convolutions with batch norm. A stage has one stream, into which each of its blocks writes before a ReLU.

A channel is rescaled behind its batch norm, by gain and bias. What is before it, and its running statistics, is only
reordered: the ε beside the variance is not rescaled with it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import linear, neurons, with_names
from symfuse.errors import SpecError
from symfuse.groups import Group, Permutation, PositiveMonomial, Signed
from symfuse.io.live import CONFIGS, CONFIGS_BY_SHAPES, Shapes, shapes_of
from symfuse.spec import Axis

NORMED = "batch norm before a non-linearity: reordered, and if that is homogeneous rescaled by gain and bias"
KERNELS = {"basic": (3, 3), "bottleneck": (1, 3, 1)}  # by the type of block
INNER = ("inner", "second_inner")


@dataclass(frozen=True)
class Sizes:
    """kernel: of the stem. streams: the channels of the stem, and of each stage; inner: inside the blocks of each.
    around: the stages whose first block has a convolution on the way around it."""

    kind: str
    kernel: int
    streams: list[int]
    inner: list[int]
    depths: list[int]
    around: list[bool]
    groups: int

    @classmethod
    def of(cls, c: Config, *, first: bool = False) -> Sizes:
        """first: whether the first stage halves the image. SpecError for sizes that are not as they must be."""
        kind, hidden = c.get("layer_type", "bottleneck"), c.entries("hidden_sizes", int, (256, 512, 1024, 2048))
        if kind not in KERNELS:
            raise SpecError(f"config.json: layer_type is {kind!r}, expected {' or '.join(KERNELS)}")
        quarter = [size // 4 if kind == "bottleneck" else size for size in hidden]
        stages = c.side_by_side(hidden_sizes=hidden, depths=[3, 4, 6, 3], inner_sizes=quarter)
        hidden, depths, inner = map(list, zip(*stages, strict=True))
        streams = [c.size("embedding_size", 64), *hidden]
        around = [i > 0 or first or one != other for i, (one, other) in enumerate(pairwise(streams))]
        return cls(kind, c.size("kernel_size", 7), streams, inner, depths, around, c.size("groups", 1))

    def stream(self, number: int) -> str:
        """The axis behind so many stages; that of the stem is the first stage's if nothing is on the way around."""
        return f"stage{number}_residual" if number else "stem_residual" if self.around[0] else "stage1_residual"


def reordered(layout: str) -> str:
    """A layout by the permutation part of its axes."""
    return re.sub(r"\|?([A-Za-z_]\w*)\|?", r"|\1|", layout)


def batch_norm(name: str, axis: str) -> dict[str, str]:
    """Gain and bias, which may be rescaled, and running statistics."""
    plain = reordered(axis)
    ends = {"weight": axis, "bias": axis, "running_mean": plain, "running_var": plain, "num_batches_tracked": "()"}
    return {f"{name}.{end}": layout for end, layout in ends.items()}


def _convolution(names: tuple[str, str], out: str, read: str, kernel: int) -> dict[str, str]:
    """A convolution without bias, and its norm."""
    return {f"{names[0]}.weight": f"{reordered(out)} {read} {kernel} {kernel}"} | batch_norm(names[1], out)


def _stage(sizes: Sizes, number: int, stream: Group) -> tuple[dict[str, str], dict[str, Axis]]:
    """The tensors and axes of a stage, from 1 on. The groups of ResNeXt may be reordered with all that is in them."""
    part, kernels, grouped = f"stage{number}_", KERNELS[sizes.kind], sizes.groups > 1
    before, own, per = sizes.stream(number - 1), sizes.stream(number), (part + "l", part + "group")[: 1 + grouped]
    units = [part + name for name in INNER[: len(kernels) - 1]]
    axes = {part + "l": Axis(sizes.depths[number - 1]), own: Axis(sizes.streams[number], stream, (), NORMED)}
    axes |= {part + "group": Axis(sizes.groups, Permutation(), per[:1])} if grouped else {}
    axes |= dict.fromkeys(units, Axis(sizes.inner[number - 1] // sizes.groups, PositiveMonomial(), per, NORMED))
    writes = [*(f"({part}group {name})" if grouped else name for name in units), own]
    reads = [f"{own}*", *(f"({part}group {name}*)" if grouped else f"{name}*" for name in units)]
    if grouped:
        reads[1] = f"{units[0]}*"  # each group its own
    at, block = f"layer{number}.0.", f"layer{number}.{{{part}l}}."
    tensors: dict[str, str] = {}
    for i, (read, write, kernel) in enumerate(zip(reads, writes, kernels, strict=True), 1):
        tensors |= _convolution((f"{block}conv{i}", f"{block}bn{i}"), write, read, kernel)
    tensors |= {f"{at}conv1.weight": f"{reordered(writes[0])} {before}* {kernels[0]} {kernels[0]}"}
    around = sizes.around[number - 1]
    return tensors | (
        _convolution((f"{at}downsample.0", f"{at}downsample.1"), own, f"{before}*", 1) if around else {}
    ), axes


def _family(c: Config, sizes: Sizes, act: str = "relu") -> Family:
    """act: behind the stem and the blocks. The largest of some pixels is another one once they are flipped."""
    group = neurons(act)
    stream = Permutation() if group == Signed() else group
    axes = {sizes.stream(0): Axis(sizes.streams[0], stream, (), NORMED)}
    tensors = _convolution(("conv1", "bn1"), sizes.stream(0), "channels", sizes.kernel)
    for number in range(1, len(sizes.depths) + 1):
        more = _stage(sizes, number, stream)
        tensors, axes = tensors | more[0], axes | more[1]
    last = sizes.stream(len(sizes.depths))
    return Family(
        axes=axes | {"channels": Axis(c.size("num_channels", 3)), "labels": Axis(c.labels)},
        tensors=tensors,
        heads={"classification": Head(("ForImageClassification",), linear("fc", "labels", f"{last}*"))},
        outputs={"last_hidden_state": f"{last} 1 1", "pooler_output": f"{last} 1 1"},
    )


def torchvision_names(stages: int) -> dict[str, str]:
    """The pieces of torchvision's names, and those of `transformers`."""
    names = {f"layer{i + 1}.": f"encoder.stages.{i}.layers." for i in range(stages)}
    for i in (1, 2, 3):
        names |= {f".conv{i}.": f".layer.{i - 1}.convolution.", f".bn{i}.": f".layer.{i - 1}.normalization."}
    names |= {"downsample.0": "shortcut.convolution", "downsample.1": "shortcut.normalization", "fc.": "classifier.1."}
    return names | {"conv1.": "embedder.embedder.convolution.", "bn1.": "embedder.embedder.normalization."}


@architecture("resnet")
def resnet(c: Config) -> Family:
    sizes = Sizes.of(c, first=c.get("downsample_in_first_stage", False))
    names = torchvision_names(len(sizes.depths))
    return with_names(_family(c, sizes, c.get("hidden_act", "relu")), names, "resnet.")


def _conv(read: int, write: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(read, write, kernel, stride, kernel // 2, groups=groups, bias=False)


class _Block(nn.Module):
    """A block of that stage. The first one halves the image, but for that of the first stage."""

    def __init__(self, sizes: Sizes, stage: int, *, first: bool) -> None:
        super().__init__()
        own, kernels, stride = sizes.streams[stage + 1], KERNELS[sizes.kind], 2 if first and stage else 1
        read = sizes.streams[stage] if first else own
        widths = [read, *[sizes.inner[stage]] * (len(kernels) - 1), own]
        for i, kernel in enumerate(kernels):
            inside = stride if kernel == 3 and 3 not in kernels[:i] else 1
            groups = sizes.groups if len(kernels) == 3 and kernel == 3 else 1
            self.add_module(f"conv{i + 1}", _conv(widths[i], widths[i + 1], kernel, inside, groups))
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(widths[i + 1]))
        around = nn.Sequential(_conv(read, own, 1, stride), nn.BatchNorm2d(own))
        self.downsample = around if first and sizes.around[stage] else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y, parts = x, [*self.children()][:-1]
        for conv, norm in zip(parts[::2], parts[1::2], strict=True):
            y = norm(conv(y if conv is parts[0] else y.relu()))
        return torch.relu(y + self.downsample(x))


def build(config: Mapping[str, Any]) -> nn.Module:
    """The live network by torchvision's names, without its weights. For small images, whose first kernel has up to five
    pixels, the stem keeps their size."""
    c = Config(config, "torchvision_resnet")
    sizes = Sizes.of(c)
    stride = 2 if sizes.kernel > 5 else 1
    stem: dict[str, nn.Module] = {"conv1": _conv(c.size("num_channels", 3), sizes.streams[0], sizes.kernel, stride)}
    stem |= {"bn1": nn.BatchNorm2d(sizes.streams[0]), "relu": nn.ReLU()}
    stem |= {"maxpool": nn.MaxPool2d(3, 2, 1)} if stride == 2 else {}
    layers = {
        f"layer{i + 1}": nn.Sequential(*(_Block(sizes, i, first=number == 0) for number in range(depth)))
        for i, depth in enumerate(sizes.depths)
    }
    end = {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(sizes.streams[-1], c.labels)}
    return nn.Sequential(OrderedDict({**stem, **layers, **end}))


EXAMPLE = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "num_labels": 1000}


def config_of(shapes: Shapes, module: nn.Module | None = None) -> dict[str, Any] | None:
    """The config of a network with torchvision's names and these shapes; None for another one, and for a live one with
    other strides."""
    if not {"conv1.weight", "layer1.0.conv2.weight", "fc.weight"} <= shapes.keys():
        return None
    kind = "bottleneck" if "layer1.0.conv3.weight" in shapes else "basic"
    blocks = [match for name in shapes if (match := re.fullmatch(r"layer(\d+)\.(\d+)\.conv1\.weight", name))]
    stages = sorted({int(block[1]) for block in blocks})
    try:
        embedding, channels, kernel, _ = shapes["conv1.weight"]
        inner = [shapes[f"layer{i}.0.conv1.weight"][0] for i in stages]
        config = {
            "model_type": "torchvision_resnet", "layer_type": kind, "num_channels": channels, "kernel_size": kernel,
            "hidden_sizes": [shapes[f"layer{i}.0.bn{len(KERNELS[kind])}.weight"][0] for i in stages],
            "depths": [sum(int(block[1]) == i for block in blocks) for i in stages], "embedding_size": embedding,
            "inner_sizes": inner, "groups": inner[0] // shapes["layer1.0.conv2.weight"][1],
            "num_labels": shapes["fc.weight"][0],
        }  # fmt: skip
        with torch.device("meta"):
            built = build(config)
    except (LookupError, ValueError, ArithmeticError, SpecError):  # shapes of another network
        return None
    same = shapes_of(built) == shapes
    return config if same and (module is None or _strides(module) == _strides(built)) else None


def _strides(net: nn.Module) -> list[Any]:
    kinds = (nn.Conv2d, nn.MaxPool2d)
    return [(name, part.stride, part.dilation) for name, part in net.named_modules() if isinstance(part, kinds)]


CONFIGS.append(lambda module: config_of(shapes_of(module), module))
CONFIGS_BY_SHAPES.append(config_of)


@architecture("torchvision_resnet", build=build, example=EXAMPLE)
def torchvision_resnet(c: Config) -> Family:
    family = _family(c, Sizes.of(c))
    return replace(family.plus(tensors=dict(family.heads["classification"].tensors)), heads={}, outputs={})
