"""Parts of messages that several modules share."""

from __future__ import annotations

import difflib
import html
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SCHEMA = 1  # the version of the keys of documents; it increases when a key changes its meaning

# Keys with spaces, which earlier versions wrote into documents, alignments and statistics.
_BLANK = (
    "at over mean", "barrier over mean", "batch statistics", "inverse of", "left of", "moved from", "new base",
    "not rotated", "of whole", "peak memory", "rounded to", "same basis", "sha256 of", "stopped at", "together with",
    "translated biases", "whole tensors", "why base",
)  # fmt: skip
_NOW = {key: key.replace(" ", "_") for key in _BLANK}


def with_current_keys(data: Any) -> Any:
    """JSON data of this version or an earlier one, with the keys of this version."""
    left = [data]  # no recursion, since data may be nested deeply
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
    """The first few names, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def first_line(error: Exception) -> str:
    """The first line of another library's error, whose message may be long; if it is empty, its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar known word to a misspelt one, if one is similar enough."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)` for a misspelt word, or nothing if no known word is similar."""
    near = nearest(word, known)
    return f" (did you mean {near!r}?)" if near else ""


def shown(summary: Callable[[Any], Mapping[str, object]]) -> tuple[Callable[[Any], str], Callable[[Any], str]]:
    """`__repr__` (one line) and `_repr_html_` (a small table for notebooks) of a class. summary: the values to show of
    an object, by title: integers are shown before their title, floats after it, and texts alone."""

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
