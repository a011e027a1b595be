"""From two models to an alignment."""

from __future__ import annotations

from symfuse.matching.activations import match_by_activations
from symfuse.matching.axes import MATCHABLE, choose_axes, choose_groups, choose_layers, word_of
from symfuse.matching.coordinate import Step, match_models
from symfuse.matching.fusion import ot_alignment
from symfuse.matching.problem import select, usual
from symfuse.matching.universe import Universe, match_universe, nearest_to_mean

__all__ = [
    "MATCHABLE", "Step", "Universe", "choose_axes", "choose_groups", "choose_layers", "match_by_activations",
    "match_models", "match_universe", "nearest_to_mean", "ot_alignment", "select", "usual", "word_of",
]  # fmt: skip
