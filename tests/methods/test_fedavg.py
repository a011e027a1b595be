"""Federated averaging: by given and by counted samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evaluation.task_cases import table
from merged import merge_models
from methods.tuned import case, classifier, data, near
from symfuse.errors import OptionError
from symfuse.evaluation import Task
from symfuse.evaluation.tasks import make_task
from symfuse.io import Checkpoint
from symfuse.methods import learn, lookup
from symfuse.methods.fedavg import examples
from symfuse.model import Model


def averaged(found: list[Checkpoint], tasks: list[Task | None] | None = None, **options: Any) -> Checkpoint:
    models = [Model.of(one) for one in found]
    given = learn(lookup("fedavg"), models, tasks=tasks, parameters=options)
    return merge_models(models, method="fedavg", learned=given, **options)


def require_shares(merged: Checkpoint, found: list[Checkpoint], shares: list[float]) -> None:
    for name, tensor in merged.items():
        expected = sum(share * one[name] for share, one in zip(shares, found, strict=True))
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-14)


def test_by_given_samples() -> None:
    found = [near(classifier(), i) for i in range(3)]
    merged = averaged(found, samples=[10, 30, 60])
    require_shares(merged, found, [0.1, 0.3, 0.6])
    assert merged.name == "fedavg(0.1·tuned 0 + 0.3·tuned 1 + 0.6·tuned 2)"
    require_shares(averaged(found, samples=7), found, [1 / 3] * 3)


def test_by_the_examples_of_the_data() -> None:
    base = classifier()
    found, tasks = [near(base, i) for i in range(2)], [data(base, step=1, batch_size=5), data(base, step=3)]
    assert [examples(task) for task in tasks] == [23, 8]
    require_shares(averaged(found, list(tasks)), found, [23 / 31, 8 / 31])
    # What is said goes before what is counted.
    require_shares(averaged(found, list(tasks), samples=[1, 3]), found, [0.25, 0.75])


@pytest.mark.parametrize(("label", "count"), [("token", 23), ("masked", 23), ("image", 9)])
def test_examples_are_no_tokens(label: str, count: int) -> None:
    assert examples(case(label)[1]) == count


def test_windows_of_a_joined_text_are_examples() -> None:
    checkpoint, task = case("causal")
    assert examples(task) == sum(len(batch["input_ids"]) for batch in task.batches)
    cut = make_task("causal-lm", table(), checkpoint, limit=3)
    assert examples(cut) == 3


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, r"the number of examples of each model is missing; set `samples`"),
    ({"samples": [0, 0]}, r"the number of examples of each model is missing; set `samples`"),
    ({"samples": [5, 0]}, "samples of tuned 1 is 0; expected a number above 0"),
    ({"samples": [-5, 1]}, "samples of tuned 0 is -5; expected a number above 0"),
    ({"samples": [1, 2, 3]}, "3 samples for 2 models"),
    ({"samples": ["many", 2]}, "samples is 'many', expected a finite number"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_wrong_samples(options: dict[str, Any], message: str) -> None:
    found = [near(classifier(), i) for i in range(2)]
    with pytest.raises(OptionError, match=message):
        averaged(found, **options)


def test_data_of_some_models_only() -> None:
    base = classifier()
    found = [near(base, i) for i in range(2)]
    with pytest.raises(OptionError, match="tuned 1: this method needs data, and there are none"):
        averaged(found, [data(base), None])
