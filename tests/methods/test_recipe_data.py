"""Data-driven methods, from recipes, the command line and Python: the same merge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import symfuse
from command import done, run
from methods.guided_cases import pair, write
from symfuse.alignment import random_alignment
from symfuse.errors import CheckpointError, DataError, IncompatibleError, OptionError, SymmetryError
from symfuse.recipes import parse_recipe
from symfuse.recipes.learn import inputs_of

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
    expected = symfuse.merge(["a", "b"], method="fisher", data=tasks(), parameters={"floor": 1e-3, "labels": "given"})
    assert_same("out", expected)
    assert_same(symfuse.merge_recipe("r.yml"), expected)
    document = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    learned = document["learned"]
    assert learned["labels"] == ["given", "given"]
    assert learned["examples"] == {"a": 12, "b": 7}
    assert [one["data"] for one in learned["data"]] == ["a.csv", "b.csv"]
    plain = symfuse.merge(["a", "b"])
    assert any((expected[n] - plain[n]).abs().max() > 1e-3 for n in plain)


def test_options_are_a_recipe(place: Path) -> None:
    shared = ("--method", "fisher", "--set", "labels=given", "--batch-size", "4")
    done("merge", "a", "b", "-o", "out", *shared, "--data", "a.csv", "--data", "b.csv")
    data = [symfuse.task(None, f"{name}.csv", name, batch_size=4) for name in "ab"]
    assert_same("out", symfuse.merge(["a", "b"], method="fisher", data=data, parameters={"labels": "given"}))
    done("merge", "a", "b", "-o", "one", *shared, "--data", "a.csv", "--column", "text=text")
    assert_same("one", symfuse.merge(["a", "b"], method="fisher", data=data[0], parameters={"labels": "given"}))


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
        (("    data: a.csv\n", ""), "fisher needs data, and a has none"),
        (("labels: given", "labels: [given, sampled]"), "one value for the whole merge"),
        (("merge_method: fisher", "merge_method: linear"), "linear does not use data"),
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
        (("--data", "a.csv"), "does not use data"),
        (("--method", "fisher"), "fisher needs data, and a has none"),
        (("--method", "fisher", "--limit", "3"), "only with --data, which is missing"),
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
    with pytest.raises(OptionError, match="list them under `models`"):
        inputs_of(recipe)


def test_encoders_without_a_head_are_run_on_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = pair("retrieval")
    a.save("a")
    b.save("b")
    Path("t.txt").write_text("abc def\nghi\njkl mno pqr\n", "utf-8")
    for method in ("regmean", "ot"):
        done("merge", "a", "b", "-o", method, "--method", method, "--data", "t.txt")
        plain, found = symfuse.merge(["a", "b"]), symfuse.open(method)
        assert any((found[name] - plain[name]).abs().max() > 1e-3 for name in plain)
    found = run("merge", "a", "b", "-o", "no", "--method", "fisher", "--data", "t.txt")
    assert found.exit_code != 0
    data = symfuse.task("retrieval", "t.txt", "a", unlabelled=True)
    with pytest.raises(DataError, match="read without their labels"):
        symfuse.evaluate("a", data)


def test_sampled_labels_and_gram_matrices_need_no_labels(place: Path) -> None:
    (place / "t.csv").write_text("text\nabc def\nghi\njkl\n", "utf-8")
    for method in ("fisher", "regmean", "fedavg", "ot"):
        done("merge", "a", "b", "-o", method, "--method", method, "--data", "t.csv")
    done("collect", "a", "--kind", "gram", "--data", "t.csv", "-o", "g")
    done("collect", "a", "--kind", "fisher", "--data", "t.csv", "-o", "f")
    for args in (
        ("merge", "a", "b", "--method", "fisher", "--set", "labels=given"),
        ("collect", "a", "--labels", "given"),
    ):
        found = run(*args, "--data", "t.csv", "-o", "no")
        assert "expected a column 'label'" in found.output
        assert found.exit_code != 0


def test_a_model_has_data_once() -> None:
    models = [{"model": "a", "data": "s"}, {"model": "b"}, {"model": "a"}]
    with pytest.raises(OptionError, match="a is listed twice, with different data"):
        inputs_of(parse_recipe({"merge_method": "fisher", "models": models, "data": "t"}))
    assert len(inputs_of(parse_recipe({"merge_method": "fisher", "models": [models[1]] * 2, "data": "t"}))) == 2


def test_statistics_say_of_which_labels_they_are(place: Path) -> None:
    for name, labels in (("a", "given"), ("b", "sampled")):
        done("collect", name, "--labels", labels, "--data", f"{name}.csv", "-o", f"{name}-f")
    found = done("merge", "a", "b", "-o", "out", "--method", "fisher", "--statistics", "a-f", "--statistics", "b-f")
    assert "of some models uses sampled labels, that of others the labels of the data" in " ".join(found.output.split())
    document = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    assert document["learned"]["labels"] == ["given", "sampled"]


def permuted(folder: str) -> dict[str, int]:
    """A folder p beside a: the same model with its ordinary tokens in another order. The tokenizer of a."""
    a = symfuse.open("a")
    tokens = json.loads(a.companions()["tokenizer.json"])
    vocabulary = tokens["model"]["vocab"]
    order = list(range(a["bert.embeddings.word_embeddings.weight"].shape[0]))
    order[5:45] = reversed(order[5:45])  # the special ones stay
    tensors = dict(a)
    name = "bert.embeddings.word_embeddings.weight"
    tensors[name] = tensors[name][order]
    tokens["model"]["vocab"] = {token: order.index(row) for token, row in vocabulary.items()}
    files = dict(a.companions()) | {"tokenizer.json": json.dumps(tokens).encode()}
    a.replace(tensors=tensors, files=files).save(folder)
    return vocabulary


def test_data_are_read_by_the_tokenizer_of_the_rows(place: Path) -> None:
    """p is b with its tokens in another order: in one vocabulary they are one model, and so are merges with them."""
    symfuse.open("b").save("kept")
    permuted("p")
    recipe = {"merge_method": "regmean", "data": "a.csv", "tokenizer_source": "base", "base_model": "b"}
    found = [symfuse.merge_recipe(recipe | {"models": [{"model": "b"}, {"model": name}]}) for name in ("a", "p")]
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-5, atol=1e-6)
    done("collect", "p", "--kind", "gram", "--data", "a.csv", "-o", "g")
    models = [{"model": "b"}, {"model": "p", "statistics": "g"}]
    with pytest.raises(IncompatibleError, match="rewritten before the merge"):
        symfuse.merge_recipe(recipe | {"models": models})


def test_computed_models_have_statistics_of_their_own(place: Path) -> None:
    a = symfuse.open("a")
    one, two = (random_alignment(symfuse.declare(a), seed, axes=("ffn",))(a) for seed in (1, 2))
    data = symfuse.task(None, "a.csv", "a")
    kept = symfuse.collect(one, data)
    with pytest.raises(IncompatibleError, match="taken from another model"):
        symfuse.merge([two, "b"], method="fisher", statistics=[kept, None], data=[None, data])
    symfuse.merge([one.save("one"), "b"], method="fisher", statistics=[kept, None], data=[None, data])  # it is the same


def test_statistics_move_with_their_own_model_only(place: Path) -> None:
    random_alignment(symfuse.declare("a"), 3, axes=("ffn",))(symfuse.open("a")).save("p")
    done("align", "p", "--to", "a", "--axes", "ffn", "--no-biases", "-o", "al")
    for name in ("a", "p"):
        done("collect", name, "--data", "a.csv", "-o", f"{name}-f")
    done("transport", "p-f", "--by", "al", "-o", "moved")
    data = symfuse.task(None, "a.csv", "b")
    symfuse.merge(["al", "b"], method="fisher", statistics=["moved", None], data=[None, data])
    Path("al/alignment.symfuse").rename("bare.safetensors")
    done("transport", "p-f", "--by", "bare.safetensors", "-o", "nameless")
    by, fisher = ("--by", "bare.safetensors", "-o", "no"), ("--method", "fisher", "--statistics")
    for args, words in (
        (("transport", "a-f", *by), "but the alignment moves"),
        (("transport", "nameless", *by), "transported before"),
        (
            ("merge", "p", "b", *fisher, "nameless", "--statistics", "a-f", "-o", "no"),
            "but this is the unaligned model",
        ),
        (("merge", "a", "b", *fisher, "a-f", "--statistics", "a-f", "-o", "a-f/out"), "a-f"),
    ):
        found = run(*args)
        assert found.exit_code != 0, args
        assert words in " ".join(found.output.split()), found.output
    assert not Path("no").exists()
    assert not Path("a-f/out").exists()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"files": {}}, "'files' is empty"),
        ({"count": 10**20}, "make no sense"),
        ({"files": {"x": "f" * 5000}}, "which is not there"),
        ({"provenance": {"model": "a"}}, "provenance.model"),
    ],
)
def test_statistics_that_are_damaged(place: Path, edit: dict[str, object], words: str) -> None:
    symfuse.collect("a", symfuse.task(None, "a.csv", "a")).save("f")
    index = Path("f/statistics.json")
    index.write_text(json.dumps(json.loads(index.read_text("utf-8")) | edit), "utf-8")
    with pytest.raises(CheckpointError, match=words):
        symfuse.merge(["a", "b"], method="fisher", statistics=["f", "f"])


def test_what_python_cannot_mean(place: Path) -> None:
    """Wrong types are refused by the tests' own type checks first, so that a script without them is run."""
    script = """
import symfuse
data = symfuse.task(None, "a.csv", "a")
for options in ({"data": ["a.csv", "b.csv"]}, {"data": "a.csv"}, {"statistics": [1, 2]}, {"statistics": "f"},
                {"data": data, "seed": "x"}, {"data": data, "weights": [0, 0]}):
    try:
        symfuse.merge(["a", "b"], method="fisher", **options)
    except symfuse.SymfuseError as error:
        print(error)
for more in ({"kind": "gram", "memory": "1GB"}, {"seed": 1.5}, {"labels": "x"}):
    try:
        symfuse.collect("a", data, **more)
    except symfuse.SymfuseError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    words = ["expected a task", "a list, each of it a task", *["a list, each of it statistics"] * 2]
    words += ["expected a whole number", "whose sum is above zero", "memory is '1GB'", "seed is 1.5", "labels is 'x'"]
    lines = found.stdout.splitlines()
    assert len(lines) == len(words), found.stdout
    for line, word in zip(lines, words, strict=True):
        assert word in line
    with pytest.raises(OptionError, match="at least 1e-09"):
        symfuse.merge(["a", "b"], method="ot", parameters={"regularisation": 1e-20})


def test_one_set_of_labels_in_two_orders_is_no_head_to_average(place: Path) -> None:
    config = json.loads(Path("b/config.json").read_text("utf-8"))
    names = [config["id2label"][str(i)] for i in range(7)][::-1]
    config |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    Path("b/config.json").write_text(json.dumps(config), "utf-8")
    for method in ("linear", "fisher"):
        more = ("--data", "a.csv") if method == "fisher" else ()
        found = run("merge", "a", "b", "-o", "out", "--method", method, *more)
        assert "have different labels" in " ".join(found.output.split())
        assert found.exit_code != 0
