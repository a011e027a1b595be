"""The interface of a merge method: a decorated generator over streamed blocks, whose signature is its configuration."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.stream import Stream

# The annotation of a parameter with one value for each model's tensor in a block (the base's excluded). The default is
# a single value, used for each: `weight: PerModel = (1.0,)`.
PerModel = Annotated[Sequence[float], "one per model"]

# A method reads the streamed blocks of one tensor, as often as necessary, and yields the merged blocks in order.
Merge = Callable[..., Iterator[Tensor]]
# What a method learns from data beforehand (`symfuse.methods.data`): from Inputs to Learned.
Learn = Callable[..., Any]
Unlabelled = Callable[[Mapping[str, Any]], bool]
Base = Literal["required", "optional", "unused"]

# Numbers meet tensors of float32, which torch refuses to scale by anything larger.
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Parameter:
    """One keyword of a method. kind: float, int, bool or str. default: None if it is required."""

    name: str
    kind: type
    per_model: bool
    default: Any

    def value(self, entry: Any, where: str) -> Any:
        """A value from a recipe, converted to this parameter's type; OptionError, with its place in the recipe, if it
        has another type or exceeds float32."""
        if self.kind is bool:
            if isinstance(entry, bool):
                return entry
        elif not isinstance(entry, bool) and isinstance(entry, (int, float, str)):
            # YAML reads 1e-5 as a string; whole numbers may have more than 308 digits.
            with suppress(ValueError, OverflowError):
                value = self.kind(entry)
                if self.kind is str or (abs(value) <= LARGEST and value == float(entry)):
                    return value
        span = f"between -{LARGEST:.2g} and {LARGEST:.2g}"
        words = {bool: "true or false", float: f"a finite number {span}", int: f"a whole number {span}", str: "a text"}
        raise OptionError(f"{where}: {self.name} is {entry!r:.24}, expected {words[self.kind]}")


@dataclass(frozen=True)
class Method:
    """A merge method. base: whether the base model's tensors are separate from the others. models: the least and the
    largest number of others. paper: the source. ignored: parameters without effect, which recipes may contain. learn:
    learns from the models' data first (`symfuse.methods`); its parameters are the method's too. statistics: the kind of
    statistics that it reads for each tensor, which can replace data. data_required: whether it needs data or
    statistics; unlabelled: whether it needs no labels, by its parameters."""

    name: str
    label: str
    paper: str
    function: Merge
    base: Base = "unused"
    models: tuple[int, int | None] = (1, None)
    ignored: tuple[str, ...] = ()
    learn: Learn | None = None
    statistics: str | None = None
    data_required: bool = False
    unlabelled: Unlabelled = lambda _parameters: False

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """From the signatures, without a trailing underscore of names (`lambda_` is `lambda` in recipes)."""
        return {**_parameters(self.function), **self.learned}

    @cached_property
    def learned(self) -> Mapping[str, Parameter]:
        """The parameters of `learn`, which have one value for the whole merge."""
        return {} if self.learn is None else _parameters(self.learn)

    def __call__(self, stream: Stream, parameters: Mapping[str, Any]) -> Iterator[Tensor]:
        """The merged blocks; parameters: by recipe name, lists for those per model."""
        keywords = inspect.signature(self.function).parameters
        return self.function(stream, **{k: parameters[n] for k in keywords if (n := k.removesuffix("_")) in parameters})


def _parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    hints = typing.get_type_hints(function, include_extras=True)
    out = {}
    for key, one in inspect.signature(function).parameters.items():
        if one.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        default = None if one.default is inspect.Parameter.empty else one.default
        per_model = hints[key] == PerModel
        name = key.removesuffix("_")
        if per_model:
            out[name] = Parameter(name, float, True, None if default is None else default[0])
        else:
            out[name] = Parameter(name, hints[key], False, default)
    return out
