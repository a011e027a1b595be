"""The runs of the demo's page, for `symfuse report`: barriers, a landscape and the alignments of its pairs."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from symfuse import api
from symfuse.alignment import Alignment
from symfuse.demo import receptors, sentences
from symfuse.evaluation import Loss, Score
from symfuse.evaluation.task import describe
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.runs import FILE

Done = Callable[[], None]


def retrieval(model: Checkpoint) -> Loss:
    """All site-reliability phrases and their paraphrases, as a task."""
    pairs = [*sentences.TRAINED_PAIRS, *sentences.UNSEEN_PAIRS]
    return api.task("retrieval", [{"query": a, "positive": b} for a, b in pairs], model)


def masked_receptors(module: torch.nn.Module) -> Score:
    """Masked amino acids of 400 sampled receptors."""
    tokens = _receptors()
    result = receptors.masked_accuracy(module, tokens)
    return Score(result.loss, {"accuracy": result.accuracy}, int((receptors.mask(tokens)[1] >= 0).sum()))


@functools.cache
def _receptors() -> torch.Tensor:
    return receptors.tokens(open_checkpoint(receptors.convert("SCEPTR")).config)


def build_receptors(checkpoint: Checkpoint) -> torch.nn.Module:
    return receptors.load(checkpoint, checkpoint.config)


def evaluation(models: Mapping[str, Path], loss: Loss) -> dict[str, Any]:
    """Loss and metrics of each model."""
    rows = []
    for label, folder in models.items():
        start = time.perf_counter()
        rows.append({"name": label, **api.evaluate(folder, loss).to_dict(), "seconds": time.perf_counter() - start})
    return {"kind": "evaluation", "task": describe(loss), "models": rows}


def write_run(folder: Path, alignment: Alignment, *documents: Mapping[str, Any]) -> Path:
    """Write a run folder: each document under the name of its kind, and the alignment."""
    folder.mkdir(parents=True, exist_ok=True)
    for document in documents:
        name = "symfuse" if document["kind"] == "alignment" else document["kind"]
        (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    alignment.save(folder / FILE)
    return folder
