"""The value of a parameter: one for all, along the layers, or by the names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from symfuse.merging import Method
from symfuse.merging.base import Parameter
from symfuse.messages import suggestion
from symfuse.methods import METHODS
from symfuse.recipes.yaml_reader import Item

Scalar: TypeAlias = str | int | float | bool
Settings: TypeAlias = Mapping[str, "Setting"]


@dataclass(frozen=True)
class Case:
    """values: one, or several that are spread over the layers. filter: a part of the names it is for; None: all.
    place: file, line and path, if it comes from a text."""

    values: tuple[Scalar, ...]
    filter: str | None = None
    place: str = field(default="", compare=False, repr=False)

    @property
    def of_all(self) -> bool:
        """Whether this is for every tensor."""
        return self.filter in (None, "*")

    def covers(self, tensor: str) -> bool:
        """Whether this is for that tensor."""
        return self.filter is None or self.of_all or self.filter in tensor


@dataclass(frozen=True)
class Setting:
    """The value of a parameter, as a recipe gives it. The first case that covers a tensor holds."""

    cases: tuple[Case, ...]

    def at(self, tensor: str, t: int | float) -> Scalar | None:
        """The value for a tensor at depth t, from 0 (the first layer) to 1 (the last); None if no case covers it.

        Of n values that at i/(n-1) holds, numbers between them interpolated linearly; of true, false and texts
        the one at or before t is taken.
        """
        values = next((case.values for case in self.cases if case.covers(tensor)), None)
        if values is None:
            return None
        position = t * (len(values) - 1)
        low = int(position)
        a, b = values[low], values[min(low + 1, len(values) - 1)]
        if isinstance(a, (bool, str)) or isinstance(b, (bool, str)) or a == b:
            return a
        part = position - low
        return (1 - part) * a + part * b


def read_settings(item: Item | None, method: Method, *, of_model: bool) -> Settings:
    """A block `parameters:`. of_model: it belongs to one model.

    OptionError for a parameter that the method does not have, or one of the whole merge set for one model; for
    values of another type, and for numbers that are infinite or too large.
    """
    if item is None:
        return {}
    settings = {}
    for name, value in item.mapping().items():
        if name not in method.parameters:
            value.fail(_unknown(name, method))
        parameter = method.parameters[name]
        if of_model and not parameter.per_model:
            value.fail(
                f"{name} of {method.name} holds for the whole merge, not for one model; move it to a block above"
            )
        settings[name] = _setting(value, parameter)
    return settings


def _unknown(name: str, method: Method) -> str:
    others = sorted(other.name for other in METHODS.values() if name in other.parameters)
    known = f"; {name} belongs to {', '.join(others)}" if others else ""
    has = ", ".join(method.parameters) or "no parameters"
    return f"unknown parameter of {method.name}{suggestion(name, method.parameters)}; it has {has}{known}"


def _setting(item: Item, parameter: Parameter) -> Setting:
    if isinstance(item.value, dict):
        return Setting((_case(item, parameter),))
    if isinstance(item.value, list) and any(isinstance(part.value, dict) for part in item.value):
        return Setting(tuple(_case(part, parameter) for part in item.value))
    return Setting((Case(_values(item, parameter), place=item.place),))


def _case(item: Item, parameter: Parameter) -> Case:
    fields = item.fields(("filter", "value"))
    if "value" not in fields:
        item.fail("`value` is missing")
    where = fields["filter"].text() if "filter" in fields else None
    return Case(_values(fields["value"], parameter), where, item.place)


def _values(item: Item, parameter: Parameter) -> tuple[Scalar, ...]:
    parts = item.sequence() if isinstance(item.value, list) else [item]
    return tuple(_scalar(part, parameter) for part in parts)


def _scalar(item: Item, parameter: Parameter) -> Scalar:
    value: Scalar = parameter.value(item.scalar(), item.place)
    return value
