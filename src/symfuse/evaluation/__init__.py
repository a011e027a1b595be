"""Measure an alignment or a merge: distances, and losses at points, along paths and on planes in weight space."""

from __future__ import annotations

from symfuse.evaluation.barrier import Barrier, Curve, Point, barrier
from symfuse.evaluation.data import Records, read_records
from symfuse.evaluation.distance import Distance, distance
from symfuse.evaluation.ensemble import ensemble
from symfuse.evaluation.landscape import Landscape, Plane, landscape
from symfuse.evaluation.renewal import renewed
from symfuse.evaluation.task import Batch, Loss, Score, Task, Totals, measure
from symfuse.evaluation.tasks import TASKS, batch_task, make_task, task_of
from symfuse.evaluation.weights import WeightSpace, evaluate, open_space

__all__ = [
    "TASKS", "Barrier", "Batch", "Curve", "Distance", "Landscape", "Loss", "Plane", "Point", "Records", "Score", "Task",
    "Totals", "WeightSpace", "barrier", "batch_task", "distance", "ensemble", "evaluate", "landscape", "make_task",
    "measure", "open_space", "read_records", "renewed", "task_of",
]  # fmt: skip
