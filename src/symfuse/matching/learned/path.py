"""Points between models whose alignment is learned. They are evaluated by the real module, with a graph to the
latents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from symfuse.alignment.apply import acting, move, shift, shifted
from symfuse.errors import IncompatibleError, OptionError
from symfuse.evaluation import Batch
from symfuse.evaluation.weights import WeightSpace
from symfuse.matching.learned.latents import Latents
from symfuse.model import Model
from symfuse.modules import canonical_names

Weights = Mapping[str, Tensor]
T = TypeVar("T")


class Path:
    """The simplex of models. Those with latents are transformed by them; None marks an anchor.

    The weights of each model are in memory once, those of the last in the module itself. The aligned weights are
    computed for each point, with their graph.
    """

    def __init__(
        self, space: WeightSpace, models: Sequence[Model], latents: Sequence[Latents | None], device: str
    ) -> None:
        self.module = space.set([*[0.0] * (len(models) - 1), 1.0]).to(device)
        self.latents = tuple(latents)
        self.names = _names(models[-1], self.module)
        own = dict(self.module.named_parameters())
        last = {name: own[memory].detach() for memory, name in self.names.items()}
        self.tensors = [
            {name: _like(space.models[i], memory, own[memory]) for memory, name in self.names.items()}
            for i in range(len(models) - 1)
        ] + [last]
        for model in models:
            _require_declared(model, last)

    def aligned(self, odds: float | None = None) -> list[Weights]:
        """The weights of each model, by canonical name, transformed by its latents as they are now."""
        return [
            tensors if latents is None else _aligned(latents, tensors, odds)
            for latents, tensors in zip(self.latents, self.tensors, strict=True)
        ]

    def at(
        self, tensors: Sequence[Weights], weights: Sequence[float], what: Callable[[Any, Batch], T], batch: Batch
    ) -> T:
        """The value of a function of the module and a batch, at the point Σ wᵢ θᵢ, with its graph."""
        device = next(self.module.parameters()).device
        here = {name: tensor.to(device) for name, tensor in batch.items()}
        point = {f"module.{memory}": mixed([m[name] for m in tensors], weights) for memory, name in self.names.items()}
        result: T = torch.func.functional_call(_Evaluated(self.module, what), point, (here,))
        return result


def mixed(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ wᵢ tᵢ for weights that sum to 1, as a series of `lerp`s, so that the mean of equal tensors is exact."""
    parts = [(t, w) for t, w in zip(tensors, weights, strict=True) if w != 0.0]
    (out, total), *rest = parts
    for tensor, weight in rest:
        total += weight
        out = torch.lerp(out, tensor, weight / total)
    return out


def corners(count: int) -> list[tuple[float, ...]]:
    """The corners of the simplex of `count` models, as weights."""
    return [tuple(float(i == j) for j in range(count)) for i in range(count)]


def inner_points(count: int, points: int) -> list[tuple[float, ...]]:
    """The weights of `count` models at which a barrier is measured. Two models: `points` of them, evenly spaced between
    the ends. Three or four: all multiples of a quarter but corners. More: the midpoints of pairs, and the centre."""
    if count == 2:
        return [(1 - i / (points + 1), i / (points + 1)) for i in range(1, points + 1)]
    if count <= 4:
        quarters = itertools.product(range(4), repeat=count)
        return [tuple(q / 4 for q in one) for one in quarters if sum(one) == 4]
    middles = [
        tuple(0.5 if i in pair else 0.0 for i in range(count)) for pair in itertools.combinations(range(count), 2)
    ]
    return [*middles, tuple(1 / count for _ in range(count))]


def point_of(keep: str | float, count: int) -> tuple[float, ...] | None:
    """The weights at the point whose loss is the criterion of `keep`; None if the barrier is."""
    if keep == "barrier":
        return None
    if keep == "midpoint":
        return tuple(1 / count for _ in range(count))
    if count != 2:
        raise OptionError(f"learning: keep is {keep}, a point between two models, and there are {count}; take midpoint")
    return (float(keep), 1 - float(keep))


class _Evaluated(nn.Module):
    """A function of a module, as a module, since `functional_call` swaps the weights of modules."""

    def __init__(self, module: nn.Module, what: Callable[[Any, Batch], Any]) -> None:
        super().__init__()
        self.module = module
        self.what = what

    def forward(self, batch: Batch) -> Any:
        return self.what(self.module, batch)


def _aligned(latents: Latents, tensors: Weights, odds: float | None) -> Weights:
    spec, actions, shifts, gauges = latents.spec, latents.actions(odds), latents.shifts(), latents.gauges
    out = {name: move(spec, acting(spec, actions, name), name, tensor) for name, tensor in tensors.items()}
    done = {
        name: shift(spec, shifts, gauges, name, out[name], out.__getitem__, out[name].dtype)
        for name in shifted(spec, shifts, gauges)
        if name in out
    }
    return out | done


def _names(model: Model, module: nn.Module) -> dict[str, str]:
    """The canonical name of each weight of the module, by its name there; IncompatibleError if one has none."""
    canonical = canonical_names(model, module)
    strange = [
        name for name, weight in module.named_parameters() if name not in canonical and weight.is_floating_point()
    ]
    if strange:
        raise IncompatibleError(
            f"{model.name}: {strange[0]} of a {type(module).__name__} has no tensor of the file as its own, so that a "
            "matching cannot be learned through it; match from weights or activations"
        )
    return canonical


def _like(tensors: Weights, name: str, like: Tensor) -> Tensor:
    return tensors[name].to(device=like.device, dtype=like.dtype, copy=True)


def _require_declared(model: Model, tensors: Weights) -> None:
    for name, tensor in tensors.items():
        shape = model.spec.tensors[name].layout.shape(model.spec.sizes)
        if tuple(tensor.shape) != shape:
            raise IncompatibleError(
                f"{model.name}: {name} has shape {tuple(tensor.shape)} in memory and {shape} in its declaration, so "
                "that a matching cannot be learned through it; match from weights or activations"
            )
