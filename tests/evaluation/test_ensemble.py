"""The ensemble: against its formula on whole outputs, one prediction after the other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import symfuse
from command import done, run
from contract.tiny import of
from evaluation.task_cases import CASES, NAMED, SEQUENCE, TEXT, task
from symfuse.errors import DataError, IncompatibleError, OptionError
from symfuse.evaluation.tasks.base import IGNORED, UNKNOWN
from symfuse.io import Checkpoint
from symfuse.modules import live
from symfuse.reports.collect import read

LABELS = ["sequence", "token", "masked", "causal", "image"]


def members(label: str, count: int = 3) -> list[Checkpoint]:
    """The model of a task, and others, as far from it as chance has it."""
    first = CASES[label][1]()
    found = [first]
    for seed in range(1, count):
        rng = torch.Generator().manual_seed(seed)
        moved = {n: t + 0.2 * torch.randn(t.shape, generator=rng, dtype=t.dtype) for n, t in first.items()}
        found.append(first.replace(tensors=moved, name=f"{label} {seed}"))
    return found


@pytest.mark.parametrize("of_what", ["probabilities", "logits"])
@pytest.mark.parametrize("label", LABELS)
def test_the_score_is_that_of_the_mean(label: str, of_what: Any) -> None:
    made, found = task(label, batch_size=4), members(label)
    modules = [live(one) for one in found]
    losses, hits = [], 0
    for batch in made.batches:
        fields = {n: f.double() if f.is_floating_point() else f for n, f in batch.items() if n != "labels"}
        with torch.no_grad():
            logits = torch.stack([module(**fields).logits for module in modules])
        labels = batch["labels"]
        if label == "causal":
            logits, labels = logits[:, :, :-1], labels[:, 1:]
        mean = logits.softmax(-1).mean(0) if of_what == "probabilities" else logits.mean(0).softmax(-1)
        for place in (labels != IGNORED).nonzero().tolist():
            p, wanted = mean[tuple(place)], int(labels[tuple(place)])
            losses.append(-math.log(p[wanted]))
            hits += int(p.argmax()) == wanted
    score = symfuse.evaluate(found, made, ensemble=of_what, dtype=torch.float64)
    torch.testing.assert_close(score.loss, sum(losses) / len(losses), rtol=1e-10, atol=0.0)
    assert score.count == len(losses)
    assert score.metrics == {"accuracy": hits / len(losses)}


def test_of_one_model_it_is_that_model() -> None:
    made, (one,) = task("sequence"), members("sequence", 1)
    alone = symfuse.evaluate(one, made)
    for of_what in ("probabilities", "logits"):
        both = symfuse.evaluate([one, one], made, ensemble=of_what)
        torch.testing.assert_close(both.loss, alone.loss, rtol=1e-6, atol=0.0)
        assert (both.metrics, both.count) == (alone.metrics, alone.count)


def test_order_and_kind_of_source_do_not_matter() -> None:
    made, found = task("sequence"), members("sequence")
    score = symfuse.evaluate(found, made, dtype=torch.float64)
    modules: list[nn.Module] = [live(one) for one in found]
    other = symfuse.evaluate(tuple(modules[::-1]), made, dtype=torch.float64)
    torch.testing.assert_close(other.loss, score.loss, rtol=1e-12, atol=0.0)


def test_the_mean_probability_is_no_worse_than_the_mean_loss() -> None:
    """Jensen's inequality."""
    made, found = task("token"), members("token")
    losses = [symfuse.evaluate(one, made).loss for one in found]
    assert symfuse.evaluate(found, made).loss < sum(losses) / len(losses)


def test_small_probabilities_are_not_lost() -> None:
    """All are sure of another class than the label: in float32 its probability is no number above zero."""
    made, (one,) = task("sequence"), members("sequence", 1)
    sure = one.replace(tensors={**one, "classifier.weight": one["classifier.weight"] * 1e4})
    alone = symfuse.evaluate(sure, made)
    assert alone.loss > 1e3
    torch.testing.assert_close(symfuse.evaluate([sure, sure], made).loss, alone.loss, rtol=1e-6, atol=0.0)


def test_families_may_differ() -> None:
    made, found = task("sequence"), members("sequence", 1)
    config = {key: TEXT[key] for key in TEXT if key != "type_vocab_size"} | NAMED
    other = of("ElectraForSequenceClassification", "ElectraConfig", config, embedding_size=11, type_vocab_size=3)(0)
    assert symfuse.evaluate([found[0], other], made).count == 23


def test_what_is_refused() -> None:
    made, found = task("sequence"), members("sequence", 2)
    three = of(SEQUENCE, "BertConfig", TEXT | {"num_labels": 3})(0).replace(name="three")
    with pytest.raises(IncompatibleError, match="three: one tells 7 classes apart, the other 3"):
        symfuse.evaluate([found[0], three], made)
    names = {label: 6 - i for label, i in found[0].config["label2id"].items()}
    turned = found[1].replace(config={**found[1].config, "label2id": names}, name="turned")
    with pytest.raises(IncompatibleError, match=r"turned: the label '\S+' is number \d in one, \d in the other"):
        symfuse.evaluate([found[0], turned], made)
    with pytest.raises(OptionError, match="made of predicted classes"):
        symfuse.evaluate(found, lambda _module: 0.0)
    with pytest.raises(OptionError, match="made of predicted classes"):
        symfuse.evaluate([CASES["retrieval"][1]()] * 2, task("retrieval"))
    with pytest.raises(OptionError, match="one number is predicted"):
        symfuse.evaluate([CASES["regression"][1]()] * 2, task("regression"))
    with pytest.raises(OptionError, match="none are given"):
        symfuse.evaluate([], made)
    unknown = type(made)([{**b, "labels": torch.full_like(b["labels"], UNKNOWN)} for b in made.batches])
    with pytest.raises(DataError, match="without their labels"):
        symfuse.evaluate(found, unknown)


def test_a_row_of_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, one in zip("ab", members("masked", 2), strict=True):
        one.save(Path(name))
    Path("t.txt").write_text("a b cd\nef g\n" * 5, "utf-8")
    command = ("evaluate", "a", "b", "--data", "t.txt", "--ensemble")
    found = json.loads(done(*command, "--json", "-o", "run").stdout)
    assert [one["name"] for one in found["models"]] == ["a", "b", "ensemble"]
    score = symfuse.evaluate(["a", "b"], symfuse.task(None, "t.txt", "a"))
    assert found["models"][2]["loss"] == score.loss
    assert found["models"][2]["metrics"] == score.metrics
    assert "ensemble" in done(*command).stdout
    assert read(Path("run/evaluation.json")) == found  # for the page
    alone = run("evaluate", "a", "--data", "t.txt", "--ensemble")
    assert alone.exit_code == 2
    assert "--ensemble needs at least two models" in alone.stderr
