"""Words that several messages share."""

from __future__ import annotations

from collections.abc import Iterable


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
