"""A recipe of adapters, merged into one: a merge method, applied to their updates, and the sum cut to a rank."""

from __future__ import annotations

from symfuse.recipes.adapters.run import MergedAdapter, merge_adapters

__all__ = ["MergedAdapter", "merge_adapters"]
