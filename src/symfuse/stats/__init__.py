"""Moments: all that solvers see of two models."""

from __future__ import annotations

from symfuse.stats.weights import Read, features, weight_moments, workspace

__all__ = ["Read", "features", "weight_moments", "workspace"]
