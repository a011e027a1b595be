"""Exact rewrites of a model, each from checkpoint to checkpoint, computed lazily: into a frame with larger symmetries
(`canonical`), to the tensors of other models (`harmonise`), into another vocabulary."""

from __future__ import annotations

from symfuse.rewriting.balance import balance
from symfuse.rewriting.canonical import REWRITES, applied, canonical
from symfuse.rewriting.frames import require_same_frame
from symfuse.rewriting.harmonise import Harmonised, Reconcile, harmonise
from symfuse.rewriting.residual import centre, drop_gauges, fold_norms
from symfuse.rewriting.rewritten import drop, renamed, zero_biases
from symfuse.rewriting.scales import fold_scales
from symfuse.rewriting.ties import untie

__all__ = [
    "REWRITES", "Harmonised", "Reconcile", "applied", "balance", "canonical", "centre", "drop", "drop_gauges",
    "fold_norms", "fold_scales", "harmonise", "renamed", "require_same_frame", "untie", "zero_biases",
]  # fmt: skip
