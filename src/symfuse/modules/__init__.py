"""Checkpoints as live modules of their real class, whole or with the weights of one layer at a time."""

from __future__ import annotations

from symfuse.modules.build import (
    build_module,
    canonical_names,
    live,
    name_parameters,
    skeleton,
    stored_as,
    stored_names,
    unloadable,
    with_defaults,
)

__all__ = [
    "build_module", "canonical_names", "live", "name_parameters", "skeleton", "stored_as", "stored_names", "unloadable",
    "with_defaults",
]  # fmt: skip
