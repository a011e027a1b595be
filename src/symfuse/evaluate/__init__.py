"""What an alignment or a merge is worth: distances, and losses at points, along paths and on planes in weight space."""

from __future__ import annotations

from symfuse.evaluate.barrier import Barrier, Curve, Point, barrier
from symfuse.evaluate.data import Records, read_records
from symfuse.evaluate.distance import Distance, distance
from symfuse.evaluate.ensemble import ensemble
from symfuse.evaluate.landscape import Landscape, Plane, landscape
from symfuse.evaluate.task import Batch, Loss, Score, Task, Totals, measure
from symfuse.evaluate.tasks import TASKS, batch_task, make_task, task_of
from symfuse.evaluate.weights import WeightSpace, evaluate, open_space

__all__ = [
    "TASKS",
    "Barrier",
    "Batch",
    "Curve",
    "Distance",
    "Landscape",
    "Loss",
    "Plane",
    "Point",
    "Records",
    "Score",
    "Task",
    "Totals",
    "WeightSpace",
    "barrier",
    "batch_task",
    "distance",
    "ensemble",
    "evaluate",
    "landscape",
    "make_task",
    "measure",
    "open_space",
    "read_records",
    "task_of",
]
