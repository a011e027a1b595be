"""Reading and writing checkpoints: safetensors and torch files, folders, hub ids, models in memory."""

from __future__ import annotations

from symfuse.io.checkpoint import Checkpoint, TensorInfo, is_finite, is_other, scan
from symfuse.io.opening import open  # noqa: A004 - symfuse.open is the verb
from symfuse.io.target import check_target
from symfuse.io.writer import write

__all__ = ["Checkpoint", "TensorInfo", "check_target", "is_finite", "is_other", "open", "scan", "write"]
