"""The verbs that run models on data, and those that show what they wrote: what they print and leave, how they fail."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from command import data, done, everything, run
from contract.tiny import GPT2, TEXT, of
from evaluation.task_cases import NAMED, byte_level, table, wordpiece
from symfuse import api
from symfuse.alignment import random_alignment
from symfuse.cli import main
from symfuse.evaluation.tasks import MaskedLM
from symfuse.io import open as open_checkpoint
from symfuse.reports.collect import read

SEQUENCE = "BertForSequenceClassification"


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data, by name."""
    root = tmp_path_factory.mktemp("originals")
    masked = {name: of("BertForMaskedLM", "BertConfig", TEXT)(seed) for seed, name in enumerate("abc")}
    made = masked | {
        "wide": of("BertForMaskedLM", "BertConfig", TEXT | {"hidden_size": 24})(0),
        "s": of(SEQUENCE, "BertConfig", TEXT | NAMED)(0),
        "three": of(SEQUENCE, "BertConfig", TEXT | {"num_labels": 3})(1),
    }
    bad = torch.full((20,), torch.nan, dtype=torch.float64)
    made["nan"] = open_checkpoint(dict(made["a"]) | {"bert.embeddings.LayerNorm.weight": bad}, config=made["a"].config)
    for name, checkpoint in made.items():
        checkpoint.replace(files=wordpiece()).save(root / name)
    for seed, name in enumerate(("gpt2", "gpt2-b")):
        of("GPT2LMHeadModel", "GPT2Config", GPT2)(seed).replace(files=byte_level()).save(root / name)
    of("BertForMaskedLM", "BertConfig", TEXT)(3).save(root / "bare")
    rows = table().rows
    (root / "t.txt").write_text("\n".join(row["text"] for row in rows), "utf-8")
    with (root / "t.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "label"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    texts = {
        "empty.txt": "", "blank.txt": "\n \n", "head.csv": "text,label\n", "label.csv": "text,label\na b,O\nc,9\n",
        "ragged.csv": "text,label\na b,1,2\n", "lines.jsonl": '{"text": "a b"}\n{"text": \n', "table.xlsx": "x",
    }  # fmt: skip
    for name, text in texts.items():
        (root / name).write_text(text, "utf-8")
    (root / "latin.txt").write_bytes("a b caf\xe9 c\n".encode("latin-1"))
    return root


def refused(folder: Path, code: int, message: str, *args: str) -> None:
    """The command ends with that code and one message, and leaves the working folder as it was."""
    before, names = everything(folder), sorted(folder.rglob("*"))
    result = run(*args)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert message in result.stderr
    assert result.stdout == ""
    assert everything(folder) == before
    assert sorted(folder.rglob("*")) == names


PATH = ("--data", "t.txt", "--points", "3", "--refine", "0")
PLANE = ("--data", "t.txt", "--steps", "2")


# ---- what each verb says and leaves


def test_evaluate(place: Path) -> None:
    found = data("evaluate", "a", "b", "--data", "t.txt", "-o", "run")
    assert set(found) == {"kind", "task", "models", "seconds", "peak_memory"}
    assert read(Path("run/evaluation.json")) == found
    assert (found["task"]["task"], found["task"]["data"]) == ("masked-lm", "t.txt")
    task = api.task(None, "t.txt", "a")
    for one, name in zip(found["models"], "ab", strict=True):
        score = api.evaluate(name, task)
        assert (one["name"], one["loss"], one["metrics"]) == (name, score.loss, dict(score.metrics))
        assert 0 < one["seconds"] <= found["seconds"]
    assert found["peak_memory"] > 2**20
    text = done("evaluate", "a", "b", "--data", "t.txt").stdout
    assert all(f"{one['loss']:.4f}" in text for one in found["models"])
    assert done("evaluate", "a", "--data", "t.txt", "--quiet", "-o", "again").output == ""
    assert read(Path("again/evaluation.json"))["models"][0]["loss"] == found["models"][0]["loss"]


def test_options_of_data(place: Path) -> None:
    found = data("evaluate", "s", "--data", "t.csv", "--limit", "5", "--seed", "3", "--batch-size", "2")
    assert (found["task"]["task"], found["models"][0]["count"]) == ("sequence-classification", 5)
    assert found["task"]["batches"] == 3
    text = Path("t.csv").read_text("utf-8").replace("text,label", "sentence,topic")
    Path("other.csv").write_text(text, "utf-8")
    columns = ("--column", "text=sentence", "--column", "label=topic")
    again = data("evaluate", "s", "--data", "other.csv", "--limit", "5", "--seed", "3", "--batch-size", "2", *columns)
    assert again["task"]["sha256"] == found["task"]["sha256"]
    assert data("evaluate", "a", "--data", "latin.txt", "--encoding", "latin-1")["models"][0]["count"] == 1
    assert data("evaluate", "a", "--data", "t.txt", "--limit", str(10**20))["models"][0]["count"] == 73


def test_barrier(place: Path) -> None:
    done("align", "a", "--to", "b", "-o", "moved", "--axes", "attention,ffn", "-q")
    names = ("permutation", "rotation", "scaling", "qk,v", "mine=moved/alignment.symfuse")
    found = data("barrier", "a", "b", *PATH, *(word for name in names for word in ("--align", name)), "-o", "run")
    assert read(Path("run/barrier.json")) == found
    assert (found["kind"], found["source"], found["anchor"]) == ("barrier", "a", "b")
    assert {"seconds", "peak_memory"} <= set(found)
    curves = {curve["name"]: curve for curve in found["curves"]}
    assert list(curves) == ["none", "permutation", "rotation", "scaling", "qk,v", "mine"]
    task = api.task(None, "t.txt", "b")
    assert curves["none"]["points"][0]["loss"] == api.evaluate("b", task).loss
    assert curves["none"]["points"][-1]["loss"] == api.evaluate("a", task).loss
    distances = [curves[name]["distance"] for name in ("none", "permutation", "rotation", "scaling")]
    assert distances == sorted(distances, reverse=True)
    assert len(set(distances)) == 4
    assert curves["mine"]["points"] == curves["scaling"]["points"]
    text = done("barrier", "a", "b", *PATH).stdout
    assert "auto" in text
    assert "none" in text
    assert done("barrier", "a", "b", *PATH, "--quiet").output == ""


def test_models_are_compared_in_the_frame_of_the_alignment(place: Path) -> None:
    """The residual stream of a pre-norm model is rotated with its norms folded: both models are, on every path."""
    found = data("barrier", "gpt2", "gpt2-b", *PATH, "--align", "residual")
    plain, aligned, folded = found["curves"]
    assert (plain["name"], aligned["name"]) == ("none", "residual")
    assert list(aligned["left_of"]) == [folded["name"], "none"]
    assert aligned["distance"] < folded["distance"]
    for end in (0, -1):
        losses = [curve["points"][end]["loss"] for curve in (plain, aligned, folded)]
        assert losses == pytest.approx([losses[0]] * 3, abs=1e-4)
    whole = data("relate", "gpt2", "gpt2-b", "--axes", "residual")
    assert [whole["before"], whole["after"]] == pytest.approx([folded["distance"], aligned["distance"]], rel=1e-4)
    corners = data("landscape", "gpt2", "gpt2-b", *PLANE, "--align", "residual")["models"]
    assert corners[2]["x"] ** 2 + corners[2]["y"] ** 2 == pytest.approx(folded["distance"] ** 2, rel=1e-4)


def test_c108_a_model_and_its_planted_copy(place: Path) -> None:
    a = open_checkpoint("a")
    random_alignment(api.declare(a), 3, axes=("qk", "v", "ffn"))(a).replace(files=wordpiece()).save("copy")
    found = data("barrier", "copy", "a", "--data", "t.txt", "--points", "5", "--refine", "0")
    none, aligned = found["curves"]
    assert none["distance"] > 1
    assert aligned["distance"] < 1e-4 * none["distance"]
    assert aligned["barrier"] < 1e-5
    assert aligned["points"][0] == none["points"][0]


def test_landscape_goes_on_where_it_stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = data("landscape", "a", "b", *PLANE, "-o", "whole")
    assert read(Path("whole/landscape.json")) == whole
    assert [model["name"] for model in whole["models"]] == ["a", "a (aligned)", "b"]
    assert (len(whole["xs"]), len(whole["loss"]), len(whole["loss"][0])) == (2, 2, 2)

    measure, calls = MaskedLM.__call__, []

    def count(self: MaskedLM, module: torch.nn.Module) -> Any:
        calls.append(module)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(self, module)

    monkeypatch.setattr(MaskedLM, "__call__", count)
    assert run("landscape", "a", "b", *PLANE, "-o", "run").exit_code == 130
    assert not Path("run/landscape.json").exists()
    resumed = data("landscape", "a", "b", *PLANE, "-o", "run")
    assert len(calls) == 4 + 4  # three were kept, of seven
    same = ("task", "models", "xs", "ys", "loss", "metrics")
    assert {key: resumed[key] for key in same} == {key: whole[key] for key in same}
    with Path("run/landscape.jsonl").open("a", encoding="utf-8") as file:
        file.write("[1, 2")  # cut off
    data("landscape", "a", "b", *PLANE, "-o", "run")
    assert len(calls) == 8
    refused(place, 8, "is of other models, data or grid", "landscape", "a", "c", *PLANE, "-o", "run")
    Path("run/landscape.jsonl").write_text(Path("run/landscape.jsonl").read_text("utf-8") + "{}\n", "utf-8")
    refused(place, 8, "no point of this landscape", "landscape", "a", "b", *PLANE, "-o", "run")


def test_landscape_of_three_models(place: Path) -> None:
    found = data("landscape", "a", "b", "c", *PLANE, "--margin", "0")
    assert [model["name"] for model in found["models"]] == ["a", "b", "c"]
    assert found["xs"][0] == 0.0
    text = done("landscape", "a", "b", "c", *PLANE, "--margin", "0").stdout
    assert "4 points, loss" in text


def test_distance_leaves_its_document(place: Path) -> None:
    found = data("relate", "a", "b", "-o", "run")
    assert read(Path("run/distance.json")) == found
    assert (found["kind"], found["source"], found["anchor"]) == ("distance", "a", "b")
    text = done("relate", "a", "b").stdout
    for row in found["by_axis"]:
        assert f"{row['cosine'][1]:.4f}" in text
    a = open_checkpoint("a")
    still = {name: torch.zeros_like(tensor) if name.endswith("bias") else tensor for name, tensor in a.items()}
    open_checkpoint(still, config=a.config).save("still")  # a zero vector has no angle
    cosines = [row["cosine"] for row in data("relate", "still", "b")["by_tensor"] if row["tensor"].endswith("bias")]
    assert [None, None] in cosines


def test_runs_are_shown(place: Path) -> None:
    done("evaluate", "a", "b", "--data", "t.txt", "-o", "run", "-q")
    done("barrier", "a", "b", *PATH, "-o", "run", "-q")
    done("landscape", "a", "b", *PLANE, "-o", "run", "-q")
    done("relate", "a", "b", "-o", "run", "-q")
    done("align", "a", "--to", "b", "-o", "moved", "-q")
    found = data("report", "run", "moved", "-o", "page.html", "--title", "Two models")
    page = Path("page.html").read_text("utf-8")
    assert found == {"output": "page.html", "bytes": Path("page.html").stat().st_size}
    assert "<title>Two models</title>" in page
    for heading in ("barriers", "The landscape", "Distances", "metrics", "Correspondences", "peak memory (MiB)"):
        assert heading in page
    assert "page.html" in done("report", "run/barrier.json", "-o", "page.html").stdout
    assert done("report", "run", "-o", "page.html", "--quiet").output == ""
    figures = data("report", "run", "moved", "-o", "figures", "--format", "png")["output"]
    assert {Path(file).name for file in figures} >= {"barrier.png", "landscape.png"}
    assert all(Path(file).read_bytes().startswith(b"\x89PNG") for file in figures)


def test_symfuse_json_says_what_matching_took(place: Path) -> None:
    done("align", "a", "--to", "b", "-o", "moved", "-q")
    found = json.loads(Path("moved/symfuse.json").read_text("utf-8"))
    assert 0 < found["seconds"] < data("align", "a", "--to", "b", "-o", "again")["seconds"] + 60
    assert found["peak_memory"] > 2**20
    done("merge", "a", "b", "-o", "merged", "--align", "all", "-q")
    (one,) = json.loads(Path("merged/symfuse.json").read_text("utf-8"))["alignments"]
    assert one["seconds"] > 0


def test_the_help_is_not_cut() -> None:
    for name, command in main.commands.items():
        assert "..." not in command.get_short_help_str(60), name


# ---- how they fail


READ: list[tuple[int, str, list[str]]] = [
    (9, "nothing.txt: there is no such file", ["a", "--data", "nothing.txt"]),
    (9, "empty.txt: the file is empty", ["a", "--data", "empty.txt"]),
    (9, "blank.txt: there are no rows", ["a", "--data", "blank.txt"]),
    (9, "head.csv: there are no rows", ["s", "--data", "head.csv"]),
    (9, "label.csv:3: the label 9 is out of range; s has 7 labels", ["s", "--data", "label.csv"]),
    (9, "ragged.csv:2: 3 fields, expected 2", ["s", "--data", "ragged.csv"]),
    (9, "expected a column 'label', found 'text'; name the right one with label_column (--column label=NAME)",
     ["s", "--data", "t.txt"]),
    (9, "latin.txt: not utf-8 at byte 7 (0xe9)", ["a", "--data", "latin.txt"]),
    (9, "--encoding latin-1", ["a", "--data", "latin.txt"]),
    (9, "lines.jsonl:2: broken JSON", ["a", "--data", "lines.jsonl"]),
    (9, "'.xlsx' are not known", ["a", "--data", "table.xlsx"]),
    (9, "'txt' (did you mean 'text'?)", ["s", "--data", "t.csv", "--column", "text=txt"]),
    (2, "does not know; such as utf-8", ["a", "--data", "t.txt", "--encoding", "klingon"]),
    (2, "--column 'text': write ROLE=NAME", ["s", "--data", "t.csv", "--column", "text"]),
    (2, "--column '=text': write ROLE=NAME", ["s", "--data", "t.csv", "--column", "=text"]),
    (2, "text is named twice", ["s", "--data", "t.csv", "--column", "text=a", "--column", "text=b"]),
    (2, "no option 'txt_column' (did you mean 'text_column'?)", ["s", "--data", "t.csv", "--column", "txt=text"]),
    (2, "no task 'masked' (did you mean 'masked-lm'?)", ["a", "--data", "t.txt", "--task", "masked"]),
    (2, "masked-lm has no option 'pooling'", ["a", "--data", "t.txt", "--pooling", "cls"]),
    (2, "a reads 2 to 37 tokens", ["a", "--data", "t.txt", "--max-length", "38"]),
    (2, "'--limit'", ["a", "--data", "t.txt", "--limit", "0"]),
    (3, "there is no tokenizer beside its weights", ["bare", "--data", "t.txt"]),
    (3, "does not exist", ["nowhere", "--data", "t.txt"]),
    (3, "of nan/model.safetensors holds 20 NaN", ["nan", "--data", "t.txt"]),
]  # fmt: skip


@pytest.mark.parametrize(("code", "message", "args"), READ, ids=[" ".join(args) for _, _, args in READ])
def test_bad_data_and_options(place: Path, code: int, message: str, args: list[str]) -> None:
    refused(place, code, message, "evaluate", *args, "-o", "run")


PAIRS: list[tuple[int, str, list[str]]] = [
    (5, "one is a bert, the other a gpt2", ["barrier", "a", "gpt2", "--data", "t.txt"]),
    (5, "hidden sizes", ["barrier", "a", "wide", *PATH]),
    (3, "of nan/model.safetensors holds 20 NaN", ["barrier", "a", "nan", *PATH, "--align", "ffn"]),
    (2, "'rotations' is not known (did you mean 'rotation'?)", ["barrier", "a", "b", *PATH, "--align", "rotations"]),
    (2, "'none' is the models without alignment", ["barrier", "a", "b", *PATH, "--align", "none"]),
    (2, "'ffn' is named twice", ["barrier", "a", "b", *PATH, "--align", "ffn", "--align", "ffn"]),
    (2, "or NAME=FOLDER, such as mine=moved", ["barrier", "a", "b", *PATH, "--align", "mine="]),
    (2, "write NAME=a/model.safetensors", ["barrier", "a", "b", *PATH, "--align", "a/model.safetensors"]),
    (3, "not an alignment of this version", ["barrier", "a", "b", *PATH, "--align", "x=a/model.safetensors"]),
    (3, "t.txt: not a readable safetensors file", ["barrier", "a", "b", *PATH, "--align", "x=t.txt"]),
    (3, "nothing does not exist", ["landscape", "a", "b", *PLANE, "--align", "x=nothing"]),
    (2, "one is named twice", ["landscape", "a", "a", "a", *PLANE]),
    (2, "one is named twice", ["landscape", "a", "a", *PLANE]),
    (5, "are two of them equal?", ["landscape", "a", "./a", *PLANE]),
    (5, "are two of them equal?", ["landscape", "a", "b", "./a", *PLANE]),
    (
        5,
        "config.json differs in hidden_size: 20 and 24",
        ["landscape", "a", "b", "wide", *PLANE],
    ),
    (2, "measured without alignment", ["landscape", "a", "b", "c", *PLANE, "--align", "ffn"]),
    (2, "a margin of 0 to 100", ["landscape", "a", "b", "c", *PLANE, "--margin", "1e300"]),
    (2, "a margin of 0 to 100", ["landscape", "a", "b", "c", *PLANE, "--margin", "nan"]),
    (5, "hidden sizes", ["relate", "a", "wide"]),
]


@pytest.mark.parametrize(("code", "message", "args"), PAIRS, ids=[" ".join(args) for _, _, args in PAIRS])
def test_models_and_alignments_that_do_not_fit(place: Path, code: int, message: str, args: list[str]) -> None:
    refused(place, code, message, *args, "-o", "run")


def test_alignments_of_other_models(place: Path) -> None:
    for model in ("gpt2", "wide"):
        done("align", model, "--to", model, "-o", f"{model}-moved", "-q")
    refused(place, 5, "this alignment of a gpt2", "barrier", "a", "b", *PATH, "--align",
            "x=gpt2-moved/alignment.symfuse")  # fmt: skip
    refused(place, 5, "does not fit", "barrier", "a", "b", *PATH, "--align", "x=wide-moved/alignment.symfuse")
    done("align", "b", "--to", "a", "-o", "back", "-q")
    swapped = done("barrier", "a", "b", *PATH, "--align", "x=back/alignment.symfuse", "-q")
    assert "warning: the alignment was computed for another source (b) than a" in swapped.stderr
    assert "warning" not in done("barrier", "b", "a", *PATH, "--align", "x=back/alignment.symfuse").stderr


def test_models_that_read_the_data_otherwise(place: Path) -> None:
    assert done("evaluate", "a", "b", "bare", "wide", "--data", "t.txt", "-q").output == ""
    result = run("evaluate", "s", "three", "--data", "t.csv")
    assert result.exit_code == 5
    assert "warning: three would read these data differently from s (t.csv:2: the label 'O'" in result.stderr
    assert "there is a label 6, and the model tells 3 apart" in result.stderr
    small = of("BertForMaskedLM", "BertConfig", TEXT | {"vocab_size": 20})(0).replace(files=wordpiece())
    small.save("small")
    result = run("evaluate", "a", "small", "--data", "t.txt")
    assert result.exit_code == 5
    assert "a BertForMaskedLM cannot be run on these data" in result.stderr


OUTPUTS = {"file": "is not a folder", "file/below": "is not a folder", "x" * 300: "too long", "taken": "is a folder"}
VERBS = {
    "evaluation": ["evaluate", "a", "--data", "t.txt"],
    "barrier": ["barrier", "a", "b", *PATH],
    "landscape": ["landscape", "a", "b", *PLANE],
    "distance": ["relate", "a", "b"],
}


@pytest.mark.parametrize("target", OUTPUTS, ids=[name[:10] for name in OUTPUTS])
@pytest.mark.parametrize("kind", VERBS)
def test_the_place_is_checked_before_any_work(
    place: Path, monkeypatch: pytest.MonkeyPatch, kind: str, target: str
) -> None:
    Path("file").write_text("mine", "utf-8")
    (place / "taken" / f"{kind}.json").mkdir(parents=True)

    def never(*_args: object, **_options: object) -> None:
        raise AssertionError("work was done before the place was checked")

    monkeypatch.setattr("symfuse.api.open_checkpoint", never)
    refused(place, 8, OUTPUTS[target], *VERBS[kind], "-o", target)


def test_a_place_that_cannot_be_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_args: object, **_options: object) -> None:  # whoever runs the tests: root may write everywhere
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", locked)
        refused(place, 8, "Permission denied", "evaluate", "a", "--data", "t.txt", "-o", "new/run")
    monkeypatch.setattr(Path, "replace", locked)  # known only at the end
    result = run("relate", "a", "b", "-o", "late")
    assert result.exit_code == 8
    assert "cannot be written" in result.stderr
    assert list(Path("late").iterdir()) == []


def test_an_older_result_is_replaced_and_its_neighbours_stay(place: Path) -> None:
    done("relate", "a", "b", "-o", "run", "-q")
    Path("run/notes.txt").write_text("mine", "utf-8")
    done("relate", "a", "c", "-o", "run", "-q")
    assert read(Path("run/distance.json"))["anchor"] == "c"
    assert {path.name for path in Path("run").iterdir()} == {"distance.json", "notes.txt"}


@pytest.mark.parametrize(
    ("code", "message", "args"),
    [
        (3, "nothing: no such folder", ["report", "nothing", "-o", "x.html"]),
        (3, "no run of symfuse in this folder", ["report", "a", "-o", "x.html"]),
        (3, "cannot be read as JSON", ["report", "t.txt", "-o", "x.html"]),
        (2, "is a directory", ["report", "a", "-o", "b"]),
        (2, "'--output'", ["report", "a"]),
        (3, "no run of symfuse in this folder", ["report", "a", "-o", "figures", "--format", "pdf"]),
        (2, "is a file", ["report", "a", "-o", "t.txt", "--format", "pdf"]),
        (2, "'--format'", ["report", "a", "-o", "figures", "--format", "gif"]),
    ],
)
def test_runs_that_cannot_be_shown(place: Path, code: int, message: str, args: list[str]) -> None:
    refused(place, code, message, *args)
