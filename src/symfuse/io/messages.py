"""Words that several messages share."""

from __future__ import annotations

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
