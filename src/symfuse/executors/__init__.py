"""Executors: threads of this process, or tasks on the machines of a Ray cluster; the results are the same."""

from __future__ import annotations

from symfuse.executors.ray import Ray
from symfuse.executors.threads import (
    Budget,
    Done,
    Executor,
    Running,
    Threads,
    Work,
    keep_freed_memory,
    one_torch_thread,
)

__all__ = ["Budget", "Done", "Executor", "Ray", "Running", "Threads", "Work", "keep_freed_memory", "one_torch_thread"]
