"""D43, D52–D55: learning without labels, from tensors in memory, which step it keeps and who teaches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import symfuse
from contract.tiny import MODELS
from symfuse.errors import DataError, IncompatibleError, OptionError
from symfuse.io import Checkpoint
from symfuse.matching.learned import Learning
from symfuse.modules import live

LABEL = "vit-classification"
HOW: dict[str, Any] = {"steps": 6, "every": 2, "patience": 9}


@pytest.fixture(scope="module")
def models() -> list[Checkpoint]:
    return [MODELS[LABEL](seed) for seed in range(3)]


@pytest.fixture(scope="module")
def batches(models: list[Checkpoint]) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    size, channels = models[0].config["image_size"], models[0].config.get("num_channels", 3)
    shape = (3, channels, *(size if isinstance(size, list) else (size, size)))
    return [
        {"pixel_values": torch.randn(shape, generator=rng), "labels": torch.randint(0, 2, (3,), generator=rng)}
        for _ in range(4)
    ]


def bare(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{"pixel_values": batch["pixel_values"]} for batch in batches]


def learned(models: list[Checkpoint], task: Any, **how: Any) -> Mapping[str, Any]:
    alignment = symfuse.match(models[0], to=models[1], axes="attention,ffn", learn=Learning(task, **HOW | how))
    record = alignment.provenance["learning"]
    assert isinstance(record, Mapping)
    return record


# ---- D53: tensors in memory


def test_d53_batches_of_tensors_are_a_task(models: list[Checkpoint], batches: list[dict[str, Tensor]]) -> None:
    task = symfuse.task("image-classification", batches, models[0])
    found = symfuse.evaluate(models[0], task)
    module = live(models[0])
    with torch.no_grad():
        logits = torch.cat([module(pixel_values=batch["pixel_values"]).logits for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert found.count == 12
    assert found.loss == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert found.metrics["accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    rows = [{name: tensor[i] for name, tensor in batch.items()} for batch in batches for i in range(3)]
    loader = DataLoader(rows, batch_size=3)  # type: ignore[arg-type]
    for same in (symfuse.task(None, iter(batches), models[0]), symfuse.task(None, loader, models[0])):
        assert same.describe() == task.describe()
    half = [
        {**batch, "pixel_values": batch["pixel_values"].bfloat16(), "labels": batch["labels"].int()}
        for batch in batches
    ]
    assert symfuse.evaluate(models[0], symfuse.task(None, half, models[0])).loss == pytest.approx(found.loss, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"pixel_values": torch.ones(3, 8, 8), "labels": torch.tensor(1)},
            r"batch 1: found pixel_values \(3, 8, 8\)",
        ),
        ({"pixel_values": torch.ones(2, 3, 8, 8), "labels": torch.ones(3)}, "the same in all"),
        ({}, "batch 1: found no fields"),
    ],
)
def test_d53_what_is_no_batch_is_refused(models: list[Checkpoint], fields: dict[str, Tensor], says: str) -> None:
    with pytest.raises(DataError, match=says):
        symfuse.task("image-classification", [fields], models[0])


def test_d53_rows_are_rows_and_options_of_reading_are_not_ignored(
    models: list[Checkpoint], batches: list[dict[str, Tensor]]
) -> None:
    with pytest.raises(DataError, match="expected a column 'image'"):
        symfuse.task("image-classification", [{"pixel_values": [1.0], "labels": 1}], models[0])
    with pytest.raises(OptionError, match="limit: this says how rows are read"):
        symfuse.task("image-classification", batches, models[0], limit=1)
    with pytest.raises(OptionError, match=r"there is no task 'image-clasification' \(did you mean"):
        symfuse.task("image-clasification", batches, models[0])


@pytest.mark.parametrize("label", ["gpt2-lm-untied", "bert-mlm"])
def test_d53_texts_as_tensors(label: str) -> None:
    model = MODELS[label]()
    ids = torch.randint(5, 12, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    task = symfuse.task(None, [{"input_ids": ids, "attention_mask": mask}], model)
    if task.name == "causal-lm":  # its labels are its own tokens, without padding
        labelled = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
        assert symfuse.evaluate(model, task) == symfuse.evaluate(model, symfuse.task(None, [labelled], model))
        assert symfuse.evaluate(model, task).count == 8
    else:
        with pytest.raises(DataError, match="without their labels"):
            symfuse.evaluate(model, task)


# ---- D52: no labels


def test_d52_distilling_alone_needs_no_labels(models: list[Checkpoint], batches: list[dict[str, Tensor]]) -> None:
    without, labelled = (symfuse.task(None, data, models[0]) for data in (bare(batches), batches))
    found, expected = (learned(models, task, distil=1.0) for task in (without, labelled))
    assert found["history"] == expected["history"]
    assert found["history"][-1]["barrier"] != found["history"][0]["barrier"]
    for distil in (0.0, 0.5):
        with pytest.raises(DataError, match="read them with labels"):
            learned(models, without, distil=distil)


# ---- D54: the step that is kept


def measured(models: list[Checkpoint], task: Any, keep: Any, **how: Any) -> tuple[list[float], list[float]]:
    history = learned(models, task, keep=keep, **how)["history"]
    return [one["barrier"] for one in history], [one["decides"] for one in history]


def test_d54_the_step_of_the_least_loss_at_the_point_is_kept(
    models: list[Checkpoint], batches: list[dict[str, Tensor]]
) -> None:
    task = symfuse.task(None, batches, models[0])
    barriers, same = measured(models, task, "barrier")
    assert barriers == same
    for keep, at in (("midpoint", 0.5), (0.25, 0.25)):
        how = Learning(
            task, validation=task, keep=keep, **HOW | {"steps": 8, "rate": 0.3}
        )  # so high that it goes astray
        alignment = symfuse.match(models[0], to=models[1], axes="attention,ffn", learn=how)
        decides = [one["decides"] for one in alignment.provenance["learning"]["history"]]
        weights = [at, 1 - at]
        merged = symfuse.merge([alignment(models[0]), alignment.in_frame(models[1])], weights=weights)
        assert symfuse.evaluate(merged, task).loss == pytest.approx(min(decides), rel=1e-4)
        assert max(decides) > min(decides) * 1.001


def test_d54_points_that_are_none_are_refused(models: list[Checkpoint], batches: list[dict[str, Tensor]]) -> None:
    task = symfuse.task(None, batches, models[0])
    for keep in ("middle", "0.5", 1.5, -0.1):
        with pytest.raises(OptionError, match=r"learning: keep is .*; expected"):
            Learning(task, keep=keep)
    with pytest.raises(OptionError, match="a point between two models, and there are 3; take midpoint"):
        symfuse.align(models, anchor=2, axes="attention,ffn", learn=Learning(task, keep=0.3, **HOW))


# ---- D55: the teacher


def test_d55_the_teacher_can_be_chosen(
    models: list[Checkpoint], batches: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    task = symfuse.task(None, bare(batches), models[0])
    models[1].save(tmp_path / "b")
    found = {
        str(i): learned(models, task, distil=1.0, teacher=teacher)
        for i, teacher in enumerate((None, 0, 1, models[1], live(models[1]), tmp_path / "b", models[2]))
    }
    histories = [one["history"] for one in found.values()]
    for same in (3, 4, 5):  # the anchor by number, as a checkpoint, a module and a folder
        for one, other in zip(histories[2], histories[same], strict=True):
            assert one["barrier"] == pytest.approx(other["barrier"], rel=1e-4, abs=1e-5)
    starts = [history[0]["barrier"] for history in histories]
    assert len({round(start, 4) for start in (starts[0], starts[1], starts[2], starts[6])}) == 4
    assert "teacher" not in found["0"]
    assert all("teacher" in found[str(i)] for i in range(1, 7))


def test_d55_teachers_that_teach_nothing_are_refused(
    models: list[Checkpoint], batches: list[dict[str, Tensor]]
) -> None:
    task = symfuse.task(None, batches, models[0])
    with pytest.raises(OptionError, match="nothing is learned from the teacher with distil 0"):
        Learning(task, teacher=0)
    with pytest.raises(OptionError, match="teacher 2: there are models 0 to 1"):
        learned(models, task, teacher=2, distil=0.5)
    other = live(models[0])
    other.classifier = nn.Linear(other.classifier.in_features, 5)  # type: ignore[union-attr, arg-type]
    with pytest.raises(IncompatibleError, match="the teacher predicts 5 classes"):
        learned(models, task, teacher=other, distil=1.0)


# ---- D43: the start from activations


def test_d43_learning_builds_its_start_from_activations_too(
    models: list[Checkpoint], batches: list[dict[str, Tensor]]
) -> None:
    built: list[str] = []

    def build(checkpoint: Checkpoint) -> nn.Module:
        built.append(checkpoint.name)
        return live(checkpoint)

    task = symfuse.task(None, batches, models[0])
    symfuse.match(models[0], to=models[1], axes="attention,ffn", learn=Learning(task, **HOW))
    assert built == []
    learning = Learning(task, build=build, **HOW)
    symfuse.match(models[0], to=models[1], axes="attention,ffn", learn=learning)
    alone = len(built)
    symfuse.match(models[0], to=models[1], axes="attention,ffn", data=task, learn=learning)
    assert len(built) == 2 * alone + 2  # both models are run for the start
    symfuse.align(models[:2], anchor=1, axes="attention,ffn", data=task, learn=learning)
    assert len(built) == 3 * alone + 4
