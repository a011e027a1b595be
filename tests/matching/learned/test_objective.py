"""What is descended: the task's loss, and how far predictions are from the models' own; against the formulas."""

from __future__ import annotations

from pathlib import Path as Folder

import pytest
import torch
from torch import Tensor

from contract.tiny import real
from matching.learned.learning_cases import history, learning, model, planted, task
from symfuse import api
from symfuse.errors import OptionError
from symfuse.evaluation import open_space
from symfuse.evaluation.tasks.base import IGNORED
from symfuse.io import Checkpoint
from symfuse.matching.learned.objective import Objective
from symfuse.matching.learned.path import Path
from symfuse.model import Model

WEIGHTS = (0.3, 0.7)


def opened(label: str, folder: Folder) -> tuple[list[Checkpoint], Path]:
    """The path of two models that stay, in float64."""
    sources = [planted(label), model(label)]
    space = open_space(sources, ["a", "b"], task(label), folder, dtype=torch.float64)
    return sources, Path(space, [Model.of(one) for one in sources], [None, None], "cpu")


def predicted(checkpoint: Checkpoint, label: str, number: int) -> tuple[Tensor, Tensor]:
    """Logits and labels of a batch, of the real class: of a decoder each position's for the next token."""
    batch = dict(task(label).batches[number])
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = real(checkpoint)(**batch).logits
    if logits.ndim == 3:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return logits[labels != IGNORED], labels[labels != IGNORED]


@pytest.mark.parametrize("distil", [pytest.param(0.0, marks=pytest.mark.slow), 0.25, 1.0])
@pytest.mark.parametrize("label", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_it_is_the_formula(label: str, distil: float, tmp_path: Folder) -> None:
    """(1 − d) Σ −log q[y] + d Σ Σ p (log p − log q) with p = Σ wᵢ pᵢ, and q of the merged model."""
    sources, path = opened(label, tmp_path)
    objective = Objective(path, task(label), distil)
    middle = api.merge(sources, method="linear", weights=list(WEIGHTS))
    for number in (0, 1, 0):  # what the models say is kept by batch
        found, count = objective(path.aligned(), WEIGHTS, task(label).batches[number])
        (logits, labels), *ends = (predicted(one, label, number) for one in (middle, *sources))
        q = logits.log_softmax(-1)
        p = sum(w * end.softmax(-1) for w, (end, _) in zip(WEIGHTS, ends, strict=True))
        assert isinstance(p, Tensor)
        loss = -q[torch.arange(len(labels)), labels].sum()
        divergence = (p * (p.log() - q)).sum()
        assert count == len(labels)
        torch.testing.assert_close(found, (1 - distil) * loss + distil * divergence, rtol=1e-9, atol=1e-9)


def test_a_corner_is_no_way_from_itself(tmp_path: Folder) -> None:
    _, path = opened("bert", tmp_path)
    objective = Objective(path, task("bert"), 1.0)
    for corner in ((1.0, 0.0), (0.0, 1.0)):
        found, _ = objective(path.aligned(), corner, task("bert").batches[0])
        torch.testing.assert_close(found, torch.zeros_like(found), rtol=0.0, atol=1e-9)


@pytest.mark.slow
def test_without_labels_nothing_depends_on_them() -> None:
    """With distil at 1 the labels may be anything; ends are then at 0, and barriers what the middle is off by."""
    source, anchor = planted("bert"), model("bert")
    other = task("bert").part(
        [dict(batch) | {"labels": 1 - batch["labels"].clamp(max=1)} for batch in task("bert").batches]
    )
    found = [
        api.match(source, anchor, axes="attention", learn=learning("bert", task=one, distil=1.0, rate=0.02))
        for one in (task("bert"), other)
    ]
    assert history(found[0]) == history(found[1])
    assert found[0].provenance["learning"]["ends"] == pytest.approx([0, 0], abs=1e-6)
    assert history(found[0])[0] > 0


class Unpredicting(type(task("bert")).__mro__[1].__mro__[1]):  # type: ignore[misc]
    """A task with a loss and no classes."""

    name, auto = "unpredicting", "AutoModelForSequenceClassification"

    def totals(self, module: torch.nn.Module, batch: object) -> object:
        return task("bert").totals(module, batch)  # type: ignore[arg-type]


def test_a_task_without_classes_cannot_teach() -> None:
    own = Unpredicting(task("bert").batches)
    with pytest.raises(OptionError, match="unpredicting predicts no classes"):
        api.match(model("bert", 1), model("bert"), axes="attention", learn=learning("bert", task=own, distil=0.5))
