"""What a merge of adapters merges: the parts of their updates, as models without a declaration.

Of each module with factors these are the coordinates of ΔW = s·B·A (`adapters.spaces`), zero for an adapter that does
not change it, and the bias of the factors; of a tensor that adapters hold as a whole, its difference from the base.

DoRA computes diag(m / |W + sBA|) (W + sBA), with norms of rows: the update diag(c − 1) W + diag(c) s B A, c being that
quotient. c − 1 and the coordinates of diag(c) s B A are parts of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NoReturn

import torch
from torch import Tensor

from symfuse.adapters.lora import MAGNITUDE
from symfuse.adapters.spaces import Pair, Space, sizes
from symfuse.adapters.updates import BIAS, Ground, Updates
from symfuse.errors import IncompatibleError, OptionError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.lazy import Rewritten, Rule
from symfuse.messages import some
from symfuse.model import Model

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """of: the value of one adapter, in float64; None: zero."""

    shape: Shape
    of: Callable[[Updates], Tensor | None]


@dataclass(frozen=True)
class Parts:
    """The parts of adapters of one base, in coordinates of a space. base: only needed for what is not of low rank."""

    adapters: Sequence[Updates]
    space: str
    base: Checkpoint | None = None
    _spaces: dict[str, Space] = field(default_factory=dict)

    @cached_property
    def modules(self) -> list[str]:
        """Those with factors, of all adapters."""
        return list(dict.fromkeys(module for one in self.adapters for module in one.factors))

    @cached_property
    def wholes(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.adapters for name in one.whole))

    @cached_property
    def biased(self) -> bool:
        """Whether factors have biases (lora_bias)."""
        return any(BIAS in keys for one in self.adapters for keys in one.factors.values())

    @cached_property
    def dora(self) -> bool:
        return any(one.config.dora for one in self.adapters)

    @cached_property
    def by_name(self) -> dict[str, Part]:
        out: dict[str, Part] = {}
        for module in self.modules:
            of_module = [one for one in self.adapters if module in one.factors]
            read, written = of_module[0].shape(module)
            shape: Shape = sizes(
                self.space, math.prod(read), math.prod(written), [one.rank(module) for one in of_module]
            )
            out[weight(module)] = Part(shape, partial(self._coordinates, module))
            if self.biased:
                out[f"{module}.lora_{BIAS}"] = Part(written[:1], partial(_bias, module))
            if self.dora:
                out[f"{module}.lora_{MAGNITUDE}"] = Part(written[:1], partial(self._stretch, module))
        for name in self.wholes:
            first = self.holder(name)
            shape = first.tensors.infos[first.whole[name]].shape
            out[self.inner(name)] = Part(shape, partial(self._difference, name, shape))
        return out

    def first(self, module: str) -> Updates:
        """The first adapter that changes a module by factors."""
        return next(one for one in self.adapters if module in one.factors)

    def holder(self, name: str) -> Updates:
        """The first adapter that holds a tensor as a whole."""
        return next(one for one in self.adapters if name in one.whole)

    def inner(self, name: str) -> str:
        """Where a tensor that is held as a whole is in the merged adapter: peft keeps that of a layer with factors
        inside it."""
        module, _, leaf = name.rpartition(".")
        return f"{module}.base_layer.{leaf}" if module in self.modules else name

    def model(self, name: str, one: Updates | None) -> Model:
        """The parts of an adapter, or of none (zeros), as a model."""

        def value(part: Part) -> Tensor:
            found = None if one is None else part.of(one)
            return torch.zeros(part.shape, dtype=torch.float64) if found is None else found

        rules = {
            key: Rule(TensorInfo(torch.float64, part.shape), partial(value, part)) for key, part in self.by_name.items()
        }
        return Model.of(Checkpoint(Rewritten(None, rules, name), {}, name=name), undeclared=True)

    # -- factors -----------------------------------------------------------------------------------

    def pair(self, module: str, one: Updates) -> Pair:
        """A and s·B, of DoRA diag(c)·s·B."""
        down, up = one.matrices(module)
        stretch = self._stretch(module, one)
        return down, up if stretch is None else (1 + stretch)[:, None] * up

    def space_of(self, module: str) -> Space:
        """Of the last module that was asked for."""
        if module not in self._spaces:
            self._spaces.clear()
            pairs = [self.pair(module, one) for one in self.adapters if module in one.factors]
            self._spaces[module] = Space.of(self.space, pairs)
        return self._spaces[module]

    def _coordinates(self, module: str, one: Updates) -> Tensor | None:
        return self.space_of(module).coordinates(self.pair(module, one)) if module in one.factors else None

    def _stretch(self, module: str, one: Updates) -> Tensor | None:
        """c − 1 of DoRA, for each row."""
        if module not in one.factors or not one.config.dora:
            return None
        down, up = one.matrices(module)
        norms = torch.linalg.vector_norm(self.weight(module) + up @ down, dim=1)
        stretch: Tensor = one.tensor(one.factors[module][MAGNITUDE]) / norms - 1
        return stretch

    # -- the base ----------------------------------------------------------------------------------

    @cached_property
    def grounds(self) -> list[Ground]:
        return [] if self.base is None else [Ground.of(one, self.base) for one in self.adapters]

    def weight(self, module: str) -> Tensor:
        """Of the base, (out × in). OptionError if the base is not there."""
        if self.base is None:
            self._need_base(f"DoRA of {module} depends on the base's weight")
        return next(ground for ground in self.grounds if module in ground.layers).weight(module)

    def start(self, name: str) -> Tensor | None:
        """A tensor of the base that adapters hold as a whole; None if the base is not there, or has none: then a merge
        starts from zero."""
        ground = next((ground for ground in self.grounds if name in ground.names), None)
        return None if ground is None else ground.base.read(ground.names[name]).double()

    def require_base(self, of_values: bool) -> None:
        """OptionError or IncompatibleError for tensors held as a whole whose merge needs a base that is not there. of
        values: whether it is a mean, which needs none."""
        for name in self.wholes:
            lacking = [str(one.folder) for one in self.adapters if name not in one.whole]
            why = f"{name} is held as a whole" + (f", and not by {some(lacking)}" if lacking else "")
            if self.base is None and (lacking or not of_values):
                self._need_base(why)
            if self.base is not None and lacking and not any(name in ground.names for ground in self.grounds):
                raise IncompatibleError(f"{why}, and {self.base.name} has no such tensor; give adapters of one task")

    def _need_base(self, why: str) -> NoReturn:
        named = next((one.config.base for one in self.adapters if one.config.base), None)
        raise OptionError(
            f"{why}, and the base of these adapters is not a local folder ({named!r}); name it: --base, or base_model "
            "in a recipe"
        )

    def _difference(self, name: str, shape: Shape, one: Updates) -> Tensor | None:
        if name not in one.whole:
            return None
        old, value = self.start(name), one.tensor(one.whole[name])
        if value.shape != shape:
            raise IncompatibleError(
                f"{name}: {list(value.shape)} in {one.folder}, {list(shape)} in {self.holder(name).folder}; give "
                "adapters of one base, with as many labels"
            )
        return value if old is None else value - old


def weight(module: str) -> str:
    """The name of the coordinates of a module."""
    return f"{module}.weight"


def _bias(module: str, one: Updates) -> Tensor | None:
    keys = one.factors.get(module, {})
    return one.config.scale_of(module) * one.tensor(keys[BIAS]) if BIAS in keys else None
