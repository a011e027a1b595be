"""Learning a matching: minimise the loss at random points between the models over the parameters of their elements
(Theus et al. 2025, Section 4.3, Algorithm 3; for several models at once, their Section 5)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from symfuse.errors import CheckpointError, DataError
from symfuse.evaluation import Batch, Task
from symfuse.evaluation.task import describe
from symfuse.matching.learned.journal import Journal, Run
from symfuse.matching.learned.latents import COLD, TEPID, WARM
from symfuse.matching.learned.objective import Objective
from symfuse.matching.learned.path import Path, Weights, corners, inner_points, point_of
from symfuse.matching.learned.settings import Learning, Progress
from symfuse.messages import first_line

WARM_UP = 0.05  # of the steps
CLIP = 1.0  # the largest norm of a gradient; longer ones are scaled down
SINGULAR: Any = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def descend(
    path: Path, learning: Learning, about: Mapping[str, Any], teacher: int | torch.nn.Module | None = None
) -> Run:
    """Learn the latents of a path, and set them to the step that is kept. about: JSON data that identify this run in
    its journal. teacher: as in `Objective`."""
    leaves = [latents.leaves for latents in path.latents if latents is not None]
    flat = [leaf for one in leaves for leaf in one.values()]
    optimizer = torch.optim.AdamW(flat, lr=learning.rate, weight_decay=0.0)
    task, validation = _split(learning)
    data = {"data": describe(task), "validation": describe(validation)}
    journal = Journal(learning.journal, {**about, **summary(learning), **data}, leaves, optimizer)
    run = journal.load() or Run()
    rng = random.Random(f"{learning.seed} {run.step}")
    judge = Objective(path, validation, float(learning.distil == 1), teacher)
    if not run.history:
        _validate(judge, learning, run, math.nan, leaves)
        journal.save(run)
    objective = Objective(path, task, learning.distil, teacher)
    batches, losses = _batches(task, rng), list[float]()
    while run.step < learning.steps and not _settled(run, learning):
        for group in optimizer.param_groups:
            group["lr"] = learning.rate * _schedule(run.step / learning.steps)
        with _computable(learning, run):
            losses.append(_step(objective, next(batches), learning, run, rng, optimizer, flat))
        run.step += 1
        if run.step % learning.every == 0 or run.step == learning.steps:
            with _computable(learning, run):
                _validate(judge, learning, run, sum(losses) / len(losses), leaves)
            journal.save(run)
            losses.clear()
            rng = random.Random(f"{learning.seed} {run.step}")  # as in a run that continues here
            batches = _batches(task, rng)
    for one, best in zip(leaves, run.best, strict=True):
        for name, leaf in one.items():
            leaf.data.copy_(best[name])
    return run


@contextmanager
def _computable(learning: Learning, run: Run) -> Iterator[None]:
    """Turn errors of singular maps and of gradients that are not finite into a CheckpointError."""
    try:
        yield
    except SINGULAR as error:
        raise CheckpointError(
            f"learning: failed after {run.step} steps ({first_line(error)}); take a smaller rate than "
            f"{learning.rate:g}, or look for overflow in the models"
        ) from error


def _step(
    objective: Objective, batch: Batch, learning: Learning, run: Run, rng: random.Random,
    optimizer: torch.optim.Optimizer, leaves: Sequence[Tensor],
) -> float:  # fmt: skip
    path = objective.path
    weights = _draw(len(path.latents), learning.spread, rng)
    total, count = objective(path.aligned(_odds(learning, run.step)), weights, batch)
    loss = total / max(1, count)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(leaves, CLIP)
    if not bool(norm.isfinite()):
        raise SINGULAR(f"the loss is {loss.item():g}, and its gradient is not finite")
    optimizer.step()
    return loss.item()


def _validate(
    judge: Objective, learning: Learning, run: Run, loss: float, leaves: Sequence[Mapping[str, Tensor]]
) -> None:
    """Measure the barrier and the criterion of `keep`, and keep the parameters if the criterion is the least so far."""
    path = judge.path
    soft, ends = learning.permutations == "soft", corners(len(path.latents))
    with torch.no_grad():
        aligned = path.aligned(TEPID if soft else None)
        if not run.ends:  # of the unaligned models, as soft permutations change the function
            run.ends = [_score(judge, path.tensors, weights) for weights in ends]
        excess = [
            _score(judge, aligned, weights) - sum(w * end for w, end in zip(weights, run.ends, strict=True))
            for weights in inner_points(len(path.latents), learning.points)
        ]
        # Exact elements do not change the losses at the ends, unless they are too ill-conditioned for float32.
        drift = [abs(_score(judge, aligned, w) - end) for w, end in zip(ends, run.ends, strict=True) if not soft]
        barrier = max(excess) + max(drift, default=0.0)
        point = point_of(learning.keep, len(path.latents))
        measured = barrier if point is None else _score(judge, aligned, point)
    if not math.isfinite(barrier + measured):
        raise CheckpointError(
            f"learning: the loss on {judge.task.source} is not finite after {run.step} steps; take a smaller rate than "
            f"{learning.rate:g}, or look at the data"
        )
    if measured < run.least:
        run.best = [{name: leaf.detach().clone() for name, leaf in one.items()} for one in leaves]
    run.history.append((run.step, loss, barrier, measured))
    if learning.progress is not None:
        start = run.history[0][2]
        least = min(barrier for _, _, barrier, _ in run.history)
        learning.progress(Progress(run.step, learning.steps, loss, barrier, least, start))


@torch.no_grad()
def _score(judge: Objective, models: Sequence[Weights], weights: Sequence[float]) -> float:
    sums = [judge(models, weights, batch) for batch in judge.task.batches]
    if (count := sum(count for _, count in sums)) == 0:
        raise DataError(f"learning: {judge.task.source} asks for nothing, so that there is no barrier; name other data")
    return math.fsum(total.item() for total, _ in sums) / count


def summary(learning: Learning) -> dict[str, Any]:
    """The options that decide what is learned, for a journal and the provenance."""
    names = ("steps", "rate", "spread", "distil", "permutations", "every", "patience", "points", "keep", "seed")
    return {name: getattr(learning, name) for name in names}


def _settled(run: Run, learning: Learning) -> bool:
    """Whether the last `patience` validations have not lowered the criterion."""
    measured = [one[-1] for one in run.history]
    return len(measured) - 1 - measured.index(run.least) >= learning.patience


def _draw(count: int, spread: float, rng: random.Random) -> list[float]:
    """Random weights: (1 − spread) / count + spread · w, with w uniform on the simplex (exponentials over their
    sum)."""
    drawn = [rng.expovariate(1.0) for _ in range(count)]
    return [(1 - spread) / count + spread * w / sum(drawn) for w in drawn]


def _schedule(share: float) -> float:
    """The factor of the learning rate: a linear warm-up, then half a cosine to 0."""
    return min(1.0, (share + 1e-3) / WARM_UP) * (1 + math.cos(math.pi * share)) / 2


def _odds(learning: Learning, step: int) -> float | None:
    """The odds of soft permutations at a step; None: they are hard."""
    if learning.permutations == "soft":
        return TEPID
    return WARM * (COLD / WARM) ** (step / learning.steps) if learning.permutations == "annealed" else None


def _split(learning: Learning) -> tuple[Task, Task]:
    """The task for learning, and the task for validation."""
    if learning.validation is not None:
        return learning.task, learning.validation
    batches = learning.task.batches
    held = max(2, min(5, len(batches)))  # every so many
    return (
        learning.task.part([b for i, b in enumerate(batches) if i % held]),
        learning.task.part([b for i, b in enumerate(batches) if not i % held]),
    )


def _batches(task: Task, rng: random.Random) -> Iterator[Batch]:
    """All batches in random order, again and again."""
    while True:
        yield from rng.sample(task.batches, len(task.batches))
