"""Moments: all that solvers see of two models."""

from __future__ import annotations

from symfuse.stats.weights import features, weight_moments

__all__ = ["features", "weight_moments"]
