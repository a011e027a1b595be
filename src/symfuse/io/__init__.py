"""Reading and writing checkpoints: safetensors and torch files, folders, hub ids, models in memory."""

from __future__ import annotations

from symfuse.io.checkpoint import Checkpoint, TensorInfo, is_finite, open, scan  # noqa: A004 - symfuse.open is the verb
from symfuse.io.writer import check_target, write

__all__ = ["Checkpoint", "TensorInfo", "check_target", "is_finite", "open", "scan", "write"]
