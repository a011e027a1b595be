"""Models that come from others, and some that only look so, for relations.py: kept in symfuse's cache folder.

Every way makes one model of a base, a model of a family that is trained here (`train.Kind`). What is trained further
gets other data: images inverted and their labels shifted, or texts that are read backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from train import Inputs, Kind

import symfuse
from symfuse.alignment.alignment import random_alignment
from symfuse.demo.packages import publishing
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.relations.moving import frame_of
from symfuse.rewriting import canonical
from symfuse.spec import anatomy, layer_of
from symfuse.widths import expand

RECIPE = 1  # increase it when a way changes
RANK, GROUP = 4, 32

Way = Callable[[Kind, Checkpoint], Checkpoint]


def turned(inputs: Inputs) -> Inputs:
    """Another task: inverted images of shifted classes, or text that is read backwards."""
    if "pixel_values" in inputs:
        return {"pixel_values": -inputs["pixel_values"], "labels": (inputs["labels"] + 1) % 10}
    return {name: tensor.flip(-1) for name, tensor in inputs.items()}


def shifted(inputs: Inputs) -> Inputs:
    """A third task: images that are rolled, their classes reversed; text of which every other letter is left out."""
    if "pixel_values" in inputs:
        return {"pixel_values": inputs["pixel_values"].roll(3, -1), "labels": 9 - inputs["labels"]}
    return {name: tensor[:, ::2] for name, tensor in inputs.items()}


def fitted(
    module: nn.Module,
    kind: Kind,
    steps: int,
    rate: float,
    order: int,
    task: Callable[[Inputs], Inputs] = dict,
    only: Iterable[nn.Parameter] | None = None,
    teacher: nn.Module | None = None,
) -> nn.Module:
    """A module trained on batches in that order, all of it or some parameters; of a teacher its outputs are learned."""
    rng = torch.Generator().manual_seed(order)
    parameters = list(module.parameters() if only is None else only)
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    module.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2
        inputs = task(kind.draw(rng))
        out = module(**inputs)
        loss = out.loss
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(**inputs).logits
            loss = nn.functional.kl_div(out.logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return module.eval()


def of_module(module: nn.Module, base: Checkpoint) -> Checkpoint:
    """The weights of a trained module as a checkpoint, under the names of the base."""
    trained = symfuse.open(module)
    return base.replace(tensors={name: trained[name].detach().clone() for name in base})


def tuned(steps: float, rate: float, task: Callable[[Inputs], Inputs]) -> Way:
    """steps, rate: as shares of those of the base."""

    def way(kind: Kind, base: Checkpoint) -> Checkpoint:
        module = symfuse.to_module(base)
        return of_module(fitted(module, kind, max(2, int(steps * kind.steps)), rate * kind.rate, 1000, task), base)

    return way


class LowRank(nn.Module):
    """W + B A, B being nothing at first."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, weight.shape[1]) / math.sqrt(weight.shape[1]))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def lora(kind: Kind, base: Checkpoint) -> Checkpoint:
    """Low-rank changes of the matrices of attention."""
    module = symfuse.to_module(base)
    matrices = [
        part
        for name, part in module.named_modules()
        if "att" in name and isinstance(getattr(part, "weight", None), nn.Parameter) and part.weight.ndim == 2
    ]
    for part in matrices:
        parametrize.register_parametrization(part, "weight", LowRank(part.weight))
    only = [p for part in matrices for name, p in part.named_parameters() if "original" not in name and name != "bias"]
    fitted(module, kind, max(2, kind.steps // 3), 2 * kind.rate, 1001, turned, only)
    for part in matrices:
        parametrize.remove_parametrizations(part, "weight")
    return of_module(module, base)


def last_layer(kind: Kind, base: Checkpoint) -> Checkpoint:
    """Only the last layer trained further."""
    spec, module = Model.of(base).spec, symfuse.to_module(base)
    stored = symfuse.open(module)  # of the same memory
    last = [spec.file_name(n) for n, d in spec.tensors.items() if layer_of(d.index) == spec.depth - 1]
    places = {stored[name].data_ptr() for name in last}
    only = [parameter for parameter in module.parameters() if parameter.data_ptr() in places]
    return of_module(fitted(module, kind, max(2, kind.steps // 3), kind.rate / 2, 1002, turned, only), base)


def rounded(bits: int) -> Way:
    """Matrices on a grid of so many bits: 8 by row, 4 by groups of GROUP numbers, each scaled to its largest one."""

    def grid(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        flat = tensor.reshape(len(tensor), -1)
        size = GROUP if bits == 4 and flat.shape[1] % GROUP == 0 else flat.shape[1]
        groups = flat.reshape(-1, size)
        step = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
        return ((groups / step).round() * step).reshape(tensor.shape)

    return lambda _, base: base.replace(tensors={name: grid(base[name]) for name in base})


def halved(_: Kind, base: Checkpoint) -> Checkpoint:
    """In bfloat16."""
    return base.to(torch.bfloat16)


def pruned(_: Kind, base: Checkpoint) -> Checkpoint:
    """The smaller half of each matrix set to zero."""

    def kept(tensor: Tensor) -> Tensor:
        return tensor if tensor.ndim < 2 else tensor * (tensor.abs() > tensor.abs().median())

    return base.replace(tensors={name: kept(base[name]) for name in base})


def cut(_: Kind, base: Checkpoint) -> Checkpoint:
    """Without its second layer."""
    spec = Model.of(base).spec
    tensors = {}
    for name, declared in spec.tensors.items():
        file, layer = spec.file_name(name), layer_of(declared.index)
        if layer != 1 and file in base:
            tensors[file.replace(f".{layer}.", f".{layer - 1}.", 1) if layer else file] = base[file]
    depth = next(key for key in ("num_hidden_layers", "n_layer") if key in base.config)
    return base.replace(tensors=tensors, config={**base.config, depth: spec.depth - 1})


def narrowed(_: Kind, base: Checkpoint) -> Checkpoint:
    """Without every other neuron of its feed-forward blocks."""
    spec = Model.of(base).spec
    tensors = {file: base[file] for file in base}
    for name, declared in spec.tensors.items():
        for dim, node in enumerate(declared.layout.dims):
            if anatomy(str(node).strip("*|")) == "ffn":
                file = spec.file_name(name)
                tensors[file] = tensors[file].index_select(dim, torch.arange(0, spec.sizes["ffn"], 2))
    size = next((key for key in ("intermediate_size", "n_inner") if key in base.config), "n_inner")
    return base.replace(tensors=tensors, config={**base.config, size: spec.sizes["ffn"] // 2})


def widened(kind: Kind, base: Checkpoint) -> Checkpoint:
    """Exactly the same in twice as many neurons."""
    size = "n_inner" if base.config["model_type"] == "gpt2" else "intermediate_size"
    config = dict(kind.config)
    config[size] = 2 * Model.of(base).spec.sizes["ffn"]
    like = symfuse.open(Kind(kind.name, kind.model, config, kind.data, 1, 1, 1.0, kind.length).build())
    return expand(Model.of(base), Model.of(like)).checkpoint


MERGE = ("long", "other")  # of which "merge" is the mean
WAYS: dict[str, Way] = {
    "copy": lambda _, base: base,
    "short": tuned(0.05, 0.3, turned),
    "long": tuned(0.5, 0.5, turned),
    "other": tuned(0.25, 0.5, shifted),
    "lora": lora,
    "last": last_layer,
    "int8": rounded(8),
    "int4": rounded(4),
    "bf16": halved,
    "pruned": pruned,
    "cut": cut,
    "narrow": narrowed,
    "wide": widened,
}


def base_of(kind: Kind, init: int, order: int | None = None) -> Path:
    """A model from random weights; order: the seed of its batches, where that is another one."""
    if order is None:
        return kind.trained(init)
    folder = kind.folder / f"{init}-as-{order}"
    if not folder.is_dir():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(init)
            module = kind.build()
        fitted(module, kind, kind.steps, kind.rate, order)
        with publishing(folder) as scratch:
            module.save_pretrained(scratch)
    return folder


def distilled(kind: Kind, base: int) -> Path:
    """A model from random weights that learned the outputs of a base: no part of it comes from there."""
    folder = kind.folder / f"distilled-{base}-{RECIPE}"
    if not folder.is_dir():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + base)
            module = kind.build()
        fitted(
            module,
            kind,
            kind.steps,
            kind.rate,
            100 + base,
            teacher=symfuse.to_module(symfuse.open(base_of(kind, base))),
        )
        with publishing(folder) as scratch:
            module.save_pretrained(scratch)
    return folder


def mean(kind: Kind, base: int) -> Checkpoint:
    """The mean of two fine-tunes of a base."""
    one, other = (symfuse.open(derived(kind, way, base)) for way in MERGE)
    return one.replace(tensors={name: (one[name] + other[name]) / 2 for name in one})


def derived(kind: Kind, way: str, base: int) -> Path:
    """A model that comes from a base in one of WAYS, or the "merge" of two such."""
    folder = kind.folder / f"{way}-{base}-{RECIPE}"
    if not folder.is_dir():
        source = symfuse.open(base_of(kind, base))
        with torch.random.fork_rng(devices=[]), publishing(folder) as scratch:
            torch.manual_seed(base)
            (mean(kind, base) if way == "merge" else WAYS[way](kind, source)).save(scratch / "model")
            for file in (scratch / "model").iterdir():
                file.rename(scratch / file.name)
            (scratch / "model").rmdir()
    return folder


def moved(source: Checkpoint, seed: int) -> Checkpoint:
    """By a random element of all that may act on it, the stream of a pre-norm model rotated too."""
    model = Model.of(source)
    model = canonical(model, frame_of([model]))
    tensors: Mapping[str, Any] = random_alignment(model.spec, seed, largest=True).on(model)
    return model.checkpoint.replace(tensors=dict(tensors.items()))
