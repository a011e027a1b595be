"""Matchings learned by minimising the loss on the path between models."""

from __future__ import annotations

from symfuse.matching.learned.match import learn, learn_universe, match_learned
from symfuse.matching.learned.settings import Learning, Progress

__all__ = ["Learning", "Progress", "learn", "learn_universe", "match_learned"]
