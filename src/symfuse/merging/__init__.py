"""Merging: one file per method, registered; what is shared stands in `engine`."""

from __future__ import annotations

from symfuse.merging import linear
from symfuse.merging.base import METHODS, Method, method
from symfuse.merging.engine import merge_models

__all__ = ["METHODS", "Method", "linear", "merge_models", "method"]
