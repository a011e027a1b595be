"""What an alignment or a merge is worth: distances here; losses along paths come with their data."""

from __future__ import annotations

from symfuse.evaluate.distance import Distance, distance

__all__ = ["Distance", "distance"]
