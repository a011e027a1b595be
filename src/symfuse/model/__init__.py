"""A checkpoint with its declaration: checks of names and shapes, stacks, inexact variants, families without one."""

from __future__ import annotations

from symfuse.model.model import (
    Model,
    as_declared,
    require_floating,
    require_same_shape,
    require_unread,
    under_file_names,
)
from symfuse.model.stacks import stacked, unstacked
from symfuse.model.variants import TRANSPORT, VARIANTS, require_variants, vary, with_split

__all__ = [
    "TRANSPORT", "VARIANTS", "Model", "as_declared", "require_floating", "require_same_shape", "require_unread",
    "require_variants", "stacked", "under_file_names", "unstacked", "vary", "with_split",
]  # fmt: skip
