"""Merges of fine-tuned models with and without matching: the scores by others' code, the gains by hand, a tiny run."""

from __future__ import annotations

from typing import Any

import finetune
import fusing
import pytest
import torch
import zhang_table1
from config import Config
from study import Row

import symfuse
from contract.tiny import TEXT, of
from evaluation.task_cases import text, wordpiece

DOMAINS = ("first", "second", "third", "rest")


def test_scores_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip(
        "sklearn.metrics", reason="scikit-learn is not installed; it comes with the extra `experiments`"
    )
    rng = torch.Generator().manual_seed(0)
    found = torch.rand(200, 6, generator=rng, dtype=torch.float64).softmax(-1)
    truth = torch.randint(5, (200,), generator=rng)  # the sixth class occurs in what is said only
    said = found.argmax(-1)
    score = fusing.score(found, truth)
    assert (said == 5).any()
    assert score["accuracy"] == pytest.approx(metrics.accuracy_score(truth, said))
    assert score["f1"] == pytest.approx(metrics.f1_score(truth, said, labels=range(5), average="macro"))
    assert score["loss"] == pytest.approx(metrics.log_loss(truth, found, labels=range(6)))


def row(seed: int, method: str, matching: str, accuracy: float, models: tuple[str, ...] = ("a", "b")) -> Row:
    scores = {where: {"accuracy": accuracy} for where in (models if len(models) == 2 else ("rest",))}
    return {"seed": seed, "method": method, "matching": matching, "models": list(models), "scores": scores}


def test_a_gain_is_against_the_same_method_and_seed() -> None:
    rows = [row(0, "simple", "none", 0.5), row(1, "simple", "none", 0.25), row(1, "simple", "both", 0.75)]
    rows += [row(0, "simple", "both", 0.5), row(0, "Fisher", "none", 0.125), row(2, "simple", "both", 1.0)]
    rows += [row(0, "simple", "none", 0.0, ("a", "b", "c")), row(0, "simple", "both", 1.0, ("a", "b", "c"))]
    scores = zhang_table1.Scores(rows, "accuracy")
    assert scores.gains("in", "accuracy", "simple", "both") == [0.0, 0.5]
    assert scores.gains("out", "accuracy", "simple", "both") == [1.0]
    assert scores.gains("in", "accuracy", "Fisher", "both") == []


def test_in_domain_is_the_mean_over_pairs() -> None:
    rows = [row(0, "simple", "none", 0.5, ("a", "b")), row(0, "simple", "none", 1.0, ("a", "c"))]
    assert zhang_table1.Scores(rows, "accuracy").values("in", "accuracy", "simple", "none") == {0: 0.75}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tuned")
    of("BertModel", "BertConfig", TEXT)(0).replace(files=wordpiece()).save(folder / "base")
    rng = torch.Generator().manual_seed(1)
    for domain in DOMAINS:
        for part, count in {"train": 12, "match": 4, "test": 30}.items():
            lines = "".join(f"{text(rng, 3)},{'ab'[i % 2]}\n" for i in range(count))
            (folder / f"{domain}-{part}.csv").write_text(f"text,label\n{lines}", "utf-8")
    about = {
        "task": "sequence-classification", "auto": "AutoModelForSequenceClassification", "labels": ["a", "b"],
        "trained": DOMAINS[:3], "held_out": DOMAINS[3], "files": str(folder / "{domain}-{split}.csv"),
    }  # fmt: skip
    tuned = {"base": str(folder / "base"), "domains": about, "batch": 4, "epochs": 2, "rate": 0.01, "tokens": 8}
    options = {
        "tuned": ["tiny"], "seeds": [3], "matchings": ["none", "both"], "methods": ["simple", "RegMean"],
        "statistics": 6, "tests": None, "apart": ["tiny"],
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYMFUSE_CACHE", str(folder / "cache"))
        yield zhang_table1.Fusion(Config("tiny", folder, "cpu", {}, {"tiny": tuned}, {"zhang_table1": options}))


@pytest.fixture(scope="module")
def rows(study: zhang_table1.Fusion) -> list[Row]:
    return list(study.rows(("tiny", 3), set()))


def one(rows: list[Row], models: tuple[str, ...], method: str, matching: str) -> Row:
    (found,) = (r for r in rows if (tuple(r["models"]), r["method"], r["matching"]) == (models, method, matching))
    return found


def test_rows_are_what_symfuse_says_of_the_models(study: zhang_table1.Fusion, rows: list[Row]) -> None:
    """By its own scores, and a mean of the tensors that is written out."""
    tuned: finetune.Tuned = study.config.tune("tiny")
    models = [tuned.model(domain, 3) for domain in DOMAINS[:3]]
    rest = tuned.part("rest", "test")
    mean = models[0].replace(tensors={name: sum(m[name] for m in models) / 3 for name in models[0]})
    losses = {
        ("simple", "none"): symfuse.evaluate(mean, rest).loss,
        ("ensemble", "none"): symfuse.evaluate(models, rest).loss,
        ("single", "second"): symfuse.evaluate(models[1], rest).loss,
    }
    assert len(set(losses.values())) == 3
    for (method, matching), loss in losses.items():
        found = one(rows, DOMAINS[:3], method, matching)["scores"]
        assert set(found) == {"rest"}
        assert found["rest"]["loss"] == pytest.approx(loss, rel=1e-5)
    own = one(rows, DOMAINS[:2], "own", "none")["scores"]
    for model, domain in zip(models, DOMAINS[:2], strict=False):
        assert own[domain]["loss"] == pytest.approx(symfuse.evaluate(model, tuned.part(domain, "test")).loss, rel=1e-5)


def test_moved_models_are_apart_and_matching_brings_them_back(study: zhang_table1.Fusion, rows: list[Row]) -> None:
    pair = DOMAINS[:2]
    none, both, apart, back = (one(rows, pair, "simple", m) for m in ("none", "both", "apart", "apart, both"))
    distances = [r["costs"]["distance"] for r in (none, both, apart, back)]
    assert distances[2] > 2 * distances[0]
    assert distances[3] == pytest.approx(distances[1], rel=0.05)
    for domain in pair:
        assert back["scores"][domain]["loss"] == pytest.approx(both["scores"][domain]["loss"], rel=1e-2)
    assert apart["scores"] != none["scores"]
    cell = zhang_table1.Cell(study.config.tune("tiny"), 3, 6, None)
    moved = cell.says(cell.matched("first", "second", "apart"), ["rest"])["rest"]
    torch.testing.assert_close(moved, cell.alone["first"]["rest"], rtol=1e-3, atol=1e-4)


def test_what_is_done_is_not_made_again(study: zhang_table1.Fusion, rows: list[Row]) -> None:
    keys = [study.key(r) for r in rows]
    assert len(set(keys)) == len(keys)
    assert [study.key(r) for r in study.rows(("tiny", 3), set(keys[1:]))] == keys[:1]
    assert "–" in study.tables(rows)
    assert len(study.claims([r | {"method": "Fisher"} for r in rows if r["method"] == "RegMean"] + rows)) == 2
