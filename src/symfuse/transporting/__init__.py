"""Adapters, vectors, probes, sparse auto-encoders, optimizer moments and statistics of a model, transformed so that
they belong to the aligned model."""

from __future__ import annotations

from symfuse.transporting.result import Transported
from symfuse.transporting.run import KINDS, aligned_model_of, alignment_of, transport

__all__ = ["KINDS", "Transported", "aligned_model_of", "alignment_of", "transport"]
