"""The content of a page before it is HTML: sections of paragraphs, tables and figures, in plain text."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from symfuse.spec import anatomy

Cell = str | int | float | None
SHARE = ".1%"  # how shares are written
_ANATOMY = {"h": "Heads", "qk": "Queries and keys", "v": "Values and outputs", "ffn": "Neurons"}
_UNITS = {"h": "head", "ffn": "neuron"}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Table:
    """columns: the format of the numbers by title ("" for text). best: "min" or "max" for columns whose best number is
    emphasised. zero: for each row, the magnitude up to which numbers count as 0 in that comparison."""

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Cell]]
    best: Mapping[str, str] = field(default_factory=dict)
    zero: Sequence[float] = ()

    def written(self, row: Sequence[Cell]) -> list[str]:
        return [write(cell, form) for cell, form in zip(row, self.columns.values(), strict=True)]

    def winners(self) -> set[tuple[int, int]]:
        """(row, column) of the best numbers; none for a column of equal numbers."""
        result = set()
        zero = self.zero or [0.0] * len(self.rows)
        for number, title in enumerate(self.columns):
            cells = [row[number] for row in self.rows]
            values = [
                0.0 if isinstance(cell, int | float) and abs(cell) <= least else cell
                for cell, least in zip(cells, zero, strict=True)
            ]
            numbers = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
            if title in self.best and len(set(numbers)) > 1:
                top = (min if self.best[title] == "min" else max)(numbers)
                result |= {(i, number) for i, value in enumerate(values) if value == top}
        return result


@dataclass(frozen=True)
class Chart:
    """spec: Vega-Lite, without colours (the page has them). text: what it shows, for readers who cannot see it.
    numbers: the data. size: "wide", or "half" of the page."""

    title: str
    text: str
    spec: Mapping[str, Any]
    numbers: Table
    size: str = "wide"


@dataclass(frozen=True)
class Alert:
    """A paragraph that a reader must not miss."""

    text: str


Part = str | Alert | Table | Chart


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Part]


def write(cell: Cell, form: str = ".4g") -> str:
    """A cell as text: missing numbers as a dash, and large ones without an exponent."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, str):
        return cell
    large = form == ".4g" and 1e4 <= abs(cell) < 1e12
    return format(cell, ",.0f" if large else form)


def tiny(number: float) -> str:
    """An error by its order, such as 8·10⁻¹⁵."""
    if not number or not math.isfinite(number):
        return str(number) if number else "0"
    digit, power = f"{number:.0e}".split("e")
    return f"{digit}·10{str(int(power)).translate(_RAISED)}"


def short(name: str, limit: int = 1000) -> str:
    """A model's name for a sentence or, with a limit, for a chart: the last two parts of a path, as in a hub id."""
    parts = [part for part in name.split("/") if part]
    last = "/".join(parts[-2:]) if parts else name
    return last if len(last) <= limit else f"{last[: limit // 2]}…{last[-(limit // 2) :]}"


def axis_title(axis: str) -> str:
    """An axis in words, if it is a common one."""
    return f"{_ANATOMY[anatomy(axis)]} ({axis})" if anatomy(axis) in _ANATOMY else axis


def unit_of(axis: str) -> str:
    """The noun for one index of an axis."""
    return _UNITS.get(anatomy(axis), "unit")


def metric_titles(metrics: Iterable[Iterable[str]], taken: Collection[str] = ()) -> dict[str, str]:
    """The metrics of all scores, with titles for their columns. Metrics may have any name; one that is already used as
    a title gets a prefix."""
    titles: dict[str, str] = {}
    for metric in dict.fromkeys(chain.from_iterable(metrics)):
        title = metric
        while title in taken or title in titles.values():
            title = f"metric {title}"
        titles[metric] = title
    return titles


def listed(words: Sequence[str]) -> str:
    """One, two and three."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
