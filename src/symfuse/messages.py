"""Words that several messages share."""

from __future__ import annotations

import difflib
import html
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SCHEMA = 1  # the version of the keys of documents: it rises when one of them gets another meaning

# Keys with blanks, as earlier versions wrote them into documents, alignments and statistics.
_BLANK = (
    "at over mean", "barrier over mean", "batch statistics", "inverse of", "left of", "moved from", "new base",
    "not rotated", "of whole", "peak memory", "rounded to", "same basis", "sha256 of", "stopped at", "together with",
    "translated biases", "whole tensors", "why base",
)  # fmt: skip
_NOW = {key: key.replace(" ", "_") for key in _BLANK}


def with_current_keys(data: Any) -> Any:
    """JSON data that were read, of this version or an earlier one, changed to the keys of this version."""
    left = [data]  # no recursion, since data may be nested as deep as a parser allows
    while left:
        one = left.pop()
        if isinstance(one, dict):
            for key in one.keys() & _NOW.keys():
                one[_NOW[key]] = one.pop(key)
            left += one.values()
        elif isinstance(one, list):
            left += one
    return data


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def first_line(error: Exception) -> str:
    """The first sentence of an error of another library, which may go on with a page of advice; else its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt one most likely stands for, if one is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)` for a misspelt word, or nothing if no known one is near."""
    near = nearest(word, known)
    return f" (did you mean {near!r}?)" if near else ""


def shown(summary: Callable[[Any], Mapping[str, object]]) -> tuple[Callable[[Any], str], Callable[[Any], str]]:
    """`__repr__` (one line) and `_repr_html_` (a small table, which notebooks print) of a class, from what is to be
    shown of an object, by title: counts with their title behind them, other numbers with it before, words alone."""

    def text(title: str, value: object) -> str:
        if isinstance(value, float):
            return f"{title} {value:.4g}"
        return f"{value:,} {title}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

    def short(self: Any) -> str:
        return f"{type(self).__name__}({', '.join(text(*item) for item in summary(self).items())})"

    def table(self: Any) -> str:
        cells = {key: f"{one:.4g}" if isinstance(one, float) else str(one) for key, one in summary(self).items()}
        rows = [f"<tr><th>{html.escape(key)}</th><td>{html.escape(cell)}</td></tr>" for key, cell in cells.items()]
        return f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"

    return short, table
