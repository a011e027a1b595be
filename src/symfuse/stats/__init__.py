"""Moments: the only input of solvers."""

from __future__ import annotations

from symfuse.stats.weights import Read, features, weight_moments, workspace

__all__ = ["Read", "features", "weight_moments", "workspace"]
