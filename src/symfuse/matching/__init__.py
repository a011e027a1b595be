"""From two models to an alignment."""

from __future__ import annotations

from symfuse.matching.anchor import nearest_to_mean
from symfuse.matching.axes import MATCHABLE, choose_axes, choose_layers
from symfuse.matching.coordinate import Step, match_models

__all__ = ["MATCHABLE", "Step", "choose_axes", "choose_layers", "match_models", "nearest_to_mean"]
