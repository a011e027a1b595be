"""Words that several messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
