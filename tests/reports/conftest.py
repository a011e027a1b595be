"""Runs as the verbs write them, of tiny models, with a name that tries to break out of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contract.tiny import MODELS
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.evaluation import Score, barrier, landscape
from symfuse.reports import alignment_run

EVIL = "</script><script>alert(1)</script>"


class Vector(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(values, dtype=torch.float64))


def bumpy(module: nn.Module) -> Score:
    """Low at the ends of the path and high between; nothing about it is symmetric, so that no mirror image passes."""
    x, y, _ = next(module.parameters()).tolist()
    loss = 0.5 + 0.1 * x + x * x * (x - 2) * (x - 2) * (1 + x / 4) + y * y
    return Score(loss, {"accuracy": 1 / (1 + loss), "<b>f1</b>": 0.5}, 40)


A, MOVED, B = Vector(2, 0, 0), Vector(2, 0.5, 1), Vector(0, 0, 0)


@pytest.fixture(scope="session")
def alignment() -> Alignment:
    source, anchor = MODELS["bert"](0), MODELS["bert"](1)
    found = api.match(source, anchor, axes="attention,ffn")
    return Alignment(found.spec, found.elements, found.shifts, dict(found.provenance))


@pytest.fixture(scope="session")
def documents(alignment: Alignment) -> dict[str, dict[str, Any]]:
    """By kind, what the verbs write."""
    source, anchor = MODELS["bert"](0), MODELS["bert"](1)
    proof = {
        "equal": True,
        "errors": {"last_hidden_state": 3e-15},
        "tolerance": 1e-12,
        "inputs": "random",
        "rounding": 0.0,
    }
    run = alignment_run(source, anchor, alignment, proof) | {"seconds": 1.25, "peak_memory": 300 * 2**20}
    run["source"] = run["source"] | {"name": EVIL}
    curves = barrier({"none": (A, B), EVIL: (MOVED, B)}, bumpy, names=("A", EVIL), dtype=torch.float64)
    plane = landscape({EVIL: A, "A (aligned)": MOVED, "B": B}, bumpy, steps=9, dtype=torch.float64)
    models = [{"name": name, **bumpy(m).to_dict(), "seconds": 0.5} for name, m in ((EVIL, A), ("half", MOVED))]
    merge = {
        "kind": "merge", "symfuse": "0.1.0", "method": "linear", "merged": "merge",
        "inputs": [run["source"], run["anchor"]], "alignments": [run],
    }  # fmt: skip
    return {
        "alignment": run,
        "merge": merge,
        "distance": {"kind": "distance", "source": "A", "anchor": "B", **run["distance"]},
        "barrier": curves.to_dict(),
        "landscape": plane.to_dict(),
        "evaluation": {"kind": "evaluation", "task": {"task": "masked-lm", "sha256": "ab" * 32}, "models": models},
    }


@pytest.fixture(scope="session")
def runs(documents: dict[str, dict[str, Any]], alignment: Alignment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a page shows; of the alignments one has other heads and neurons in every layer."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("merge", "distance", "barrier", "landscape", "evaluation"):
        name = "symfuse.json" if kind == "merge" else f"{kind}.json"
        (folder / name).write_text(json.dumps(documents[kind]), "utf-8")
    alignment.save(folder / "alignment-1.safetensors")
    random_alignment(alignment.spec, 0, axes=("h", "ffn", "qk")).save(folder / "alignment-2.safetensors")
    return folder
