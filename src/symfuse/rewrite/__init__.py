"""Changes of a model before a merge, each from checkpoint to checkpoint, computed when read."""

from __future__ import annotations

from symfuse.rewrite.harmonise import Harmonised, Reconcile, harmonise
from symfuse.rewrite.rewritten import drop, renamed, untie, zero_biases

__all__ = ["Harmonised", "Reconcile", "drop", "harmonise", "renamed", "untie", "zero_biases"]
