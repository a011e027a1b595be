"""An element of a group for each axis instance, from a source to an anchor: applied, inverted, composed, saved."""

from __future__ import annotations

from symfuse.alignment.alignment import Alignment, random_alignment

__all__ = ["Alignment", "random_alignment"]
