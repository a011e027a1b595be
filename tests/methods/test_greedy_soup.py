"""The greedy soup: against the recipe written out on whole models, and what it promises."""

from __future__ import annotations

import pytest
import torch

import symfuse
from merged import merge_models
from methods.guided_cases import pair
from methods.tuned import classifier, data, near
from symfuse.errors import CheckpointError, OptionError
from symfuse.evaluation import Task, measure, read_records
from symfuse.evaluation.tasks import make_task
from symfuse.io import Checkpoint
from symfuse.methods import Fitted, learn, lookup
from symfuse.model import Model
from symfuse.modules import live


def soups(found: list[Checkpoint], task: Task, **options: str) -> Fitted:
    models = [Model.of(one) for one in found]
    given = learn(lookup("greedy_soup"), models, tasks=[task] * len(models), parameters=options)
    assert given is not None
    return given


def judged(found: list[Checkpoint], task: Task, metric: str) -> float:
    """Of the mean of these models, by a module of its own."""
    mean = {name: torch.stack([one[name] for one in found]).mean(0) for name in found[0]}
    score = measure(task, live(found[0].replace(tensors=mean), torch.float32))
    return -score.loss if metric == "loss" else score.metrics[metric]


def recipe(found: list[Checkpoint], task: Task, metric: str) -> list[int]:
    """Wortsman et al. 2022, recipe 1, line by line."""
    alone = {i: judged([one], task, metric) for i, one in enumerate(found)}
    ingredients: list[int] = []
    for i in sorted(alone, key=lambda i: (-alone[i], i)):
        with_it = judged([found[j] for j in [*ingredients, i]], task, metric)
        if not ingredients or with_it >= judged([found[j] for j in ingredients], task, metric):
            ingredients.append(i)
    return ingredients


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_soup_is_that_of_the_recipe(seed: int, metric: str) -> None:
    base = classifier(seed=seed)
    found, task = [near(base, i, 0.15) for i in range(4)], data(base, step=1, batch_size=23)
    given = soups(found, task, metric=metric)
    steps = given.learned.record["steps"]
    taken = [step["model"] for step in steps if step["taken"]]
    assert taken == recipe(found, task, metric)
    assert given.learned.record["metric"] == metric
    merged = merge_models([Model.of(one) for one in found], method="greedy_soup", learned=given)
    for name, tensor in merged.items():
        mean = sum(found[i][name] for i in taken) / len(taken)
        torch.testing.assert_close(tensor, mean, rtol=1e-12, atol=1e-14)
    best = max(judged([one], task, metric) for one in found)
    last = [step["soup"] for step in steps if step["taken"]][-1]
    value = judged([merged], task, metric)
    torch.testing.assert_close(abs(value), last, rtol=1e-5, atol=0.0)
    assert value >= best - 1e-6


def test_a_bad_model_is_left_out() -> None:
    base = classifier()
    task = data(base, step=1)
    good = [near(base, i, 0.001) for i in range(2)]
    labels = torch.cat([batch["labels"] for batch in task.batches])
    predicted = torch.cat([live(base)(**{n: f for n, f in b.items() if n != "labels"}).logits for b in task.batches])
    hits = [type(task)([{**b, "labels": p.argmax(-1)} for b, p in zip(task.batches, predicted.split(4), strict=True)])]
    assert not torch.equal(labels, predicted.argmax(-1))
    bad = base.replace(tensors={n: -3 * t if n == "classifier.weight" else t for n, t in base.items()}, name="bad")
    given = soups([bad, *good], hits[0])
    assert [given.value("weight", i, "classifier.weight") for i in range(3)] == [0.0, 0.5, 0.5]
    assert given.learned.record["steps"][-1]["model"] == 0
    assert not given.learned.record["steps"][-1]["taken"]


def test_ties_go_to_the_first_and_into_the_soup() -> None:
    base = classifier()
    given = soups([base, base, base], data(base))
    assert [step["model"] for step in given.learned.record["steps"]] == [0, 1, 2]
    assert [given.value("weight", i, "any") for i in range(3)] == [1 / 3] * 3
    merged = merge_models([Model.of(base)] * 3, method="greedy_soup", learned=given)
    assert all(torch.equal(tensor, base[name]) for name, tensor in merged.items())


def test_a_model_that_overflows_is_left_out() -> None:
    base = classifier()
    huge = base.replace(tensors={**base, "classifier.bias": base["classifier.bias"] * 1e39}, name="huge")
    given = soups([huge, near(base, 1)], data(base), metric="loss")
    assert [given.value("weight", i, "any") for i in range(2)] == [0.0, 1.0]
    assert given.learned.record["steps"][1] == {"model": 0, "alone": None, "soup": None, "taken": False}
    with pytest.raises(CheckpointError, match="no model has a finite loss"):
        soups([huge, huge], data(base), metric="loss")


def test_what_it_needs() -> None:
    base = classifier()
    models, task, other = [Model.of(near(base, i)) for i in range(2)], data(base), data(base, first=1)
    method = lookup("greedy_soup")
    with pytest.raises(OptionError, match=r"no metric 'acuracy' .did you mean 'accuracy'.*choose from accuracy, loss"):
        learn(method, models, tasks=[task, task], parameters={"metric": "acuracy"})
    with pytest.raises(OptionError, match=r"same data, and those of tuned 1.*give one validation set for all"):
        learn(method, models, tasks=[task, other])
    with pytest.raises(OptionError, match="needs `heads: average`"):
        learn(method, models, tasks=[task, task], heads="drop")
    with pytest.raises(OptionError, match="needs data, and there are none"):
        learn(method, models)
    again = data(base)
    assert again is not task
    assert learn(method, models, tasks=[task, again]) is not None


def test_from_python() -> None:
    base = classifier()
    found, task = [near(base, i, 0.15) for i in range(3)], data(base, step=1)
    merged = symfuse.merge(found, method="greedy_soup", data=task, parameters={"metric": "loss"})
    assert symfuse.evaluate(merged, task).loss <= min(symfuse.evaluate(one, task).loss for one in found) + 1e-6


def test_a_model_whose_outputs_are_nan_is_in_no_soup() -> None:
    """Its argmax is class 0, which may be right by accident."""
    a, b = pair()
    wide = b.to(torch.float64)
    broken = wide.replace(tensors={n: t * 1e20 if "layer" in n else t for n, t in wide.items()})
    task = make_task("sequence-classification", read_records([{"text": "abc def", "label": "O"}]), a)
    found = soups([a.to(torch.float64), broken], task)
    assert [step["model"] for step in found.learned.record["steps"] if step["taken"]] == [0]
