"""Matchings learned by descending the loss between models."""

from __future__ import annotations

from symfuse.learning.match import learn, learn_universe, match_learned
from symfuse.learning.settings import Learning, Progress

__all__ = ["Learning", "Progress", "learn", "learn_universe", "match_learned"]
