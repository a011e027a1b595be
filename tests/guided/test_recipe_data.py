"""Methods that look at data, from recipes, the command line and Python: the same merge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from guided_cases import write

import symfuse
from command import done, run
from symfuse.alignment import random_alignment
from symfuse.errors import OptionError, SymmetryError
from symfuse.recipe import parse_recipe

RECIPE = """\
merge_method: fisher
models:
  - model: a
    data: a.csv
  - {model: b, data: {file: b.csv, limit: 7}}
data: {batch_size: 4, seed: 3}
parameters: {floor: 1.0e-3, labels: given, weight: 1.0}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "r.yml").write_text(RECIPE, "utf-8")
    return tmp_path


def tasks() -> list[symfuse.api.Task]:
    one = symfuse.task(None, "a.csv", "a", batch_size=4, seed=3)
    return [one, symfuse.task(None, "b.csv", "b", batch_size=4, seed=3, limit=7)]


def assert_same(found: str | Path | symfuse.Checkpoint, expected: symfuse.Checkpoint) -> None:
    merged = found if isinstance(found, symfuse.Checkpoint) else symfuse.open(found)
    assert set(merged) == set(expected)
    for name in expected:
        assert torch.equal(merged[name], expected[name]), name


def test_a_recipe_is_the_merge_of_python(place: Path) -> None:
    assert "impossible" not in done("check", "r.yml").stdout
    done("merge", "r.yml", "out")
    expected = symfuse.merge(["a", "b"], method="fisher", data=tasks(), floor=1e-3, labels="given")
    assert_same("out", expected)
    assert_same(symfuse.merge_recipe("r.yml"), expected)
    document = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    assert document["learned"] | {"notes": 0} == {"labels": "given", "examples": {"a": 12, "b": 7}, "notes": 0}
    plain = symfuse.merge(["a", "b"])
    assert any((expected[n] - plain[n]).abs().max() > 1e-3 for n in plain)


def test_options_are_a_recipe(place: Path) -> None:
    shared = ("--method", "fisher", "--set", "labels=given", "--batch-size", "4")
    done("merge", "a", "b", "-o", "out", *shared, "--data", "a.csv", "--data", "b.csv")
    data = [symfuse.task(None, f"{name}.csv", name, batch_size=4) for name in "ab"]
    assert_same("out", symfuse.merge(["a", "b"], method="fisher", data=data, labels="given"))
    done("merge", "a", "b", "-o", "one", *shared, "--data", "a.csv", "--column", "text=text")
    assert_same("one", symfuse.merge(["a", "b"], method="fisher", data=data[0], labels="given"))


def test_statistics_are_kept_and_taken_again(place: Path) -> None:
    for name in "ab":
        done("collect", name, "--kind", "fisher", "--data", f"{name}.csv", "--batch-size", "4", "-o", f"{name}-f")
    done("merge", "a", "b", "-o", "out", "--method", "fisher", "--statistics", "a-f", "--statistics", "b-f")
    data = [symfuse.task(None, f"{name}.csv", name, batch_size=4) for name in "ab"]
    assert_same("out", symfuse.merge(["a", "b"], method="fisher", data=data))
    assert_same("out", symfuse.merge(["a", "b"], method="fisher", statistics=["a-f", "b-f"]))
    found = run("merge", "a", "b", "-o", "no", "--method", "fisher", "--statistics", "b-f", "--statistics", "a-f")
    assert found.exit_code != 0
    assert "taken from another model" in found.output
    assert not Path("no").exists()


ALIGNED = """\
merge_method: fisher
models: [{model: p, statistics: p-f}, {model: b, data: b.csv}]
data: {batch_size: 4}
align: {anchor: 2, axes: [ffn], biases: false}
"""


def test_statistics_move_with_the_alignment(place: Path) -> None:
    """p is a with its neurons in another order: aligned, and its statistics with it, it is a again."""
    random_alignment(symfuse.declare("a"), 3, axes=("ffn",))(symfuse.open("a")).save("p")
    done("collect", "p", "--data", "a.csv", "--batch-size", "4", "-o", "p-f")
    done("collect", "a", "--data", "a.csv", "--batch-size", "4", "-o", "a-f")
    Path("aligned.yml").write_text(ALIGNED, "utf-8")
    done("merge", "aligned.yml", "out")
    symfuse.merge(["a", "b"], method="fisher", statistics=["a-f", None],
                  data=[None, symfuse.task(None, "b.csv", "b", batch_size=4)]).save("expected")  # fmt: skip
    found, expected = symfuse.open("out"), symfuse.open("expected")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    unmoved = symfuse.merge(["p", "b"], method="fisher", statistics=["p-f", None],
                            data=[None, symfuse.task(None, "b.csv", "b", batch_size=4)])  # fmt: skip
    assert any((unmoved[n] - expected[n]).abs().max() > 1e-2 for n in expected)


def test_a_fisher_that_cannot_move_is_said(place: Path) -> None:
    done("collect", "a", "--data", "a.csv", "-o", "a-f")
    recipe = ALIGNED.replace("model: p, statistics: p-f", "model: a, statistics: a-f")
    Path("aligned.yml").write_text(recipe.replace("axes: [ffn]", "axes: [attention]"), "utf-8")
    with pytest.raises(SymmetryError, match="rotated"):
        symfuse.merge_recipe("aligned.yml")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (("    data: a.csv\n", ""), "there are none for a"),
        (("labels: given", "labels: [given, sampled]"), "one value for the whole merge"),
        (("merge_method: fisher", "merge_method: linear"), "linear does not look at data"),
        (("data: a.csv", "data: c.csv"), "c.csv"),
        (("data: a.csv", "statistics: nothing"), "nothing holds no statistics.json"),
        (("batch_size: 4", "batch_size: 0"), "batch_size"),
        (("batch_size: 4", "batch: 4"), "unknown key"),
        (("limit: 7", "columns: {text: words}"), "words"),
        (("labels: given", "labels: guessed"), "labels is 'guessed'"),
        (("data: a.csv", "data: wrong.csv"), "label"),
    ],
)
def test_what_a_recipe_cannot_mean(place: Path, edit: tuple[str, str], words: str) -> None:
    (place / "wrong.csv").write_text("text,label\nabc,O\nabd,nonsense\n", "utf-8")
    (place / "r.yml").write_text(RECIPE.replace(*edit), "utf-8")
    assert edit[0] in RECIPE
    found = run("merge", "r.yml", "out")
    assert found.exit_code != 0
    assert words in " ".join(found.output.split()), found.output
    assert "Traceback" not in found.output
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--data", "a.csv"), "does not look at data"),
        (("--method", "fisher"), "there are none for a"),
        (("--method", "fisher", "--limit", "3"), "this is how data are read"),
        (("--method", "fisher", "--statistics", "x"), "given 1 times for 2 models"),
        (("--method", "fisher", "--data", "a.csv", "--data", "b.csv", "--data", "a.csv"), "given 3 times for 2"),
        (("--method", "fisher", "--data", "a.csv", "--column", "text"), "ROLE=NAME"),
    ],
)
def test_options_that_make_no_sense(place: Path, args: tuple[str, ...], words: str) -> None:
    found = run("merge", "a", "b", "-o", "out", *args)
    assert found.exit_code != 0
    assert words in " ".join(found.output.split()), found.output
    assert not Path("out").exists()


def test_slices_have_no_data_of_a_whole_model() -> None:
    recipe = parse_recipe(
        {"merge_method": "fisher", "slices": [{"sources": [{"model": "a", "layer_range": [0, 1]}]}], "data": "t.csv"}
    )
    from symfuse.pipeline import inputs_of

    with pytest.raises(OptionError, match="list them under `models`"):
        inputs_of(recipe)
