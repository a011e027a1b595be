"""What rides along with a model: adapters, vectors, probes, sparse auto-encoders and moments, in the frame of the
aligned model."""

from __future__ import annotations

from symfuse.transporting.result import Transported
from symfuse.transporting.run import KINDS, alignment_of, moved_model, transport

__all__ = ["KINDS", "Transported", "alignment_of", "moved_model", "transport"]
