"""Tiny models and what stands for fine-tunes of them: the weights a little off, in float64; and tasks for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from contract.tiny import of
from evaluation.task_cases import CASES, NAMED, SEQUENCE, TEXT, table, wordpiece
from symfuse.evaluation import Task, make_task
from symfuse.evaluation.data import read_records
from symfuse.io import Checkpoint
from symfuse.methods import Inputs
from symfuse.model import Model


def near(base: Checkpoint, seed: int, size: float = 0.1) -> Checkpoint:
    """Every weight moved a little, by the seed."""
    rng = torch.Generator().manual_seed(100 + seed)
    moved = {n: t + size * torch.randn(t.shape, generator=rng, dtype=t.dtype) for n, t in base.items()}
    return base.replace(tensors=moved, name=f"tuned {seed}")


@cache
def classifier(labels: int = 7, seed: int = 0, layers: int = 2) -> Checkpoint:
    options: dict[str, Any] = {"num_labels": labels} if labels != 7 else NAMED
    return of(SEQUENCE, "BertConfig", TEXT, **options, num_hidden_layers=layers)(seed).replace(files=wordpiece())


def models(base: Checkpoint, count: int = 2, size: float = 0.1) -> list[Model]:
    """The base and its fine-tunes."""
    return [Model.of(one) for one in (base, *(near(base, seed, size) for seed in range(count)))]


def data(base: Checkpoint, first: int = 0, step: int = 2, **options: Any) -> Task:
    """Every other row of the table, or whatever `first` and `step` say, with labels that the model has."""
    labels = int(base.config.get("num_labels") or len(base.config["id2label"]))
    rows = [{"text": row["text"], "label": i % labels} for i, row in enumerate(table().rows)][first::step]
    return make_task("sequence-classification", read_records(rows), base, **{"batch_size": 4} | options)


def inputs(found: Sequence[Model], tasks: Sequence[Task], **options: Any) -> Inputs:
    """Of the base and its fine-tunes."""
    return Inputs(models=tuple(found[1:]), base=found[0], tasks=tuple(tasks), **options)


def case(label: str) -> tuple[Checkpoint, Task]:
    """One of the tasks' own tests."""
    name, checkpoint, records, more = CASES[label]
    return checkpoint(), make_task(name, records(), checkpoint(), batch_size=6, **more)
