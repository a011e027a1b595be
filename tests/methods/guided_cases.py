"""Two tiny classifiers of one shape, folders of them, and data: for data-driven methods."""

from __future__ import annotations

from pathlib import Path

import torch

from evaluation.task_cases import CASES, table
from methods.tuned import classifier
from symfuse.io import Checkpoint


def pair(label: str = "sequence", noise: float = 0.1) -> tuple[Checkpoint, Checkpoint]:
    """A tiny model with random weights, and one beside it."""
    a = CASES[label][1]().replace(name="a")
    return a, beside(a, noise, 1, "b")


def beside(a: Checkpoint, noise: float, seed: int, name: str) -> Checkpoint:
    """That model with noise on its weights."""
    rng = torch.Generator().manual_seed(seed)
    moved = {n: t + noise * torch.randn(t.shape, generator=rng, dtype=t.dtype) if t.is_floating_point() else t
             for n, t in a.items()}  # fmt: skip
    return a.replace(tensors=moved, name=name)


def write(folder: Path) -> None:
    """Folders a and b, classifiers of one layer, and a.csv and b.csv, halves of the table."""
    a = classifier(layers=1).replace(name="a")
    for checkpoint in (a, beside(a, 0.1, 1, "b")):
        checkpoint.save(folder / checkpoint.name)
    rows = [f"{row['text']},{row['label']}" for row in table().rows]
    for name, half in (("a", rows[::2]), ("b", rows[1::2])):
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *half]) + "\n", "utf-8")
