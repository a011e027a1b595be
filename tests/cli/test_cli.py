"""The command line: what it prints, writes and returns, and what it leaves behind when it fails (nothing)."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import transformers
from torch import Tensor

from command import done, run
from contract.tiny import MODELS, TEXT, of
from symfuse import api, cli
from symfuse.alignment import Alignment
from symfuse.cli import main
from symfuse.cli.app import import_at_once
from symfuse.cli.verbs import VERBS as LISTED
from symfuse.groups import Similarity
from symfuse.io import open as open_checkpoint
from symfuse.recipes import align as aligning

Folders = dict[str, Path]


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    made = {
        "a": MODELS["bert-mlm"](0), "b": MODELS["bert-mlm"](1), "c": MODELS["bert-mlm"](2),
        "tagger": MODELS["bert-token"](0), "gpt2": MODELS["gpt2-lm"](0),
        "wide": of("BertForMaskedLM", "BertConfig", TEXT, hidden_size=24)(0),
    }  # fmt: skip
    return {name: checkpoint.save(root / name) for name, checkpoint in made.items()}


@pytest.fixture
def models(originals: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with all models in it."""
    for name, folder in originals.items():
        shutil.copytree(folder, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data(*args: str) -> dict[str, Any]:
    """The one document that --json prints."""
    result = done(*args, "--json")
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(folder: Path, code: int, message: str, *args: str) -> None:
    """The command ends with that code and one message, and the working folder is what it was."""
    before, names = everything(folder), sorted(folder.iterdir())
    result = run(*args)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert everything(folder) == before
    assert sorted(folder.iterdir()) == names


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_complete(folder: Path, kind: type) -> None:
    _, report = kind.from_pretrained(folder, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(report.values()), report


# ---- what each verb says


def test_inspect(models: Path) -> None:
    found = data("inspect", "a")
    assert set(found) == {"model", "family", "tensors", "parameters", "dtypes", "heads", "axes", "notes"}
    assert (found["model"], found["family"], found["dtypes"]) == ("a", "bert", "float64")
    a = open_checkpoint("a")
    assert found["tensors"] == len(a)
    assert found["parameters"] == sum(tensor.numel() for tensor in a.values())
    axes = {row["axis"]: row for row in found["axes"]}
    assert set(axes["ffn"]) == {"axis", "size", "group", "instances", "matched_by", "why"}
    assert (axes["ffn"]["group"], axes["ffn"]["size"], axes["ffn"]["instances"]) == ("permutation", 29, 2)
    assert (axes["qk"]["group"], axes["qk"]["instances"], axes["qk"]["matched_by"]) == (
        "invertible map",
        8,
        "attention",
    )
    assert (axes["vocab"]["group"], axes["vocab"]["instances"]) == ("none", 0)
    assert (axes["h"]["matched_by"], axes["residual"]["matched_by"]) == ("heads", "residual")
    text = done("inspect", "a").stdout
    assert text.startswith("a: bert, 42 tensors, ")
    assert all(axis in text for axis in axes)


def test_align(models: Path) -> None:
    before = everything(models)
    run_ = data("align", "a", "--to", "b", "-o", "out", "--axes", "attention,ffn")
    assert set(run_) == {
        "kind", "symfuse", "source", "anchor", "options", "paper", "matched", "translated_biases", "distance",
        "verified", "frame", "output", "seconds", "peak_memory",
    }  # fmt: skip
    assert run_["output"] == "out"
    for key, name in (("source", "a"), ("anchor", "b")):
        assert run_[key] == open_checkpoint(name).lineage()
        assert (run_[key]["name"], run_[key]["folder"]) == (name, name)
        assert re.fullmatch("[0-9a-f]{64}", run_[key]["sha256"])
    assert run_["options"]["axes"] == ["qk", "v", "ffn"]
    assert {row["axis"]: row["units"] for row in run_["matched"]} == {"qk": 8, "v": 8, "ffn": 2}
    assert set(run_["matched"][0]) == {"axis", "group", "units", "moved", "before", "after", "condition"}
    assert max(run_["verified"]["errors"].values()) < 1e-12 < run_["verified"]["tolerance"]
    assert 0 < run_["verified"]["rounding"] < 1e-12
    assert run_["distance"]["after"] < run_["distance"]["before"]
    assert run_["distance"]["before"] == pytest.approx(api.relate("a", "b").distance.euclidean)
    assert run_["distance"]["after"] == pytest.approx(api.relate("out", "b").distance.euclidean)
    assert {name: content for name, content in everything(models).items() if not name.startswith("out/")} == before

    out = models / "out"
    assert {path.name for path in out.iterdir()} == {
        "model.safetensors", "config.json", "symfuse.json", "README.md", "alignment.symfuse",
    }  # fmt: skip
    written = json.loads((out / "symfuse.json").read_text("utf-8"))
    assert written.pop("card_sha256") == sha256((out / "README.md").read_bytes()).hexdigest()
    cost = ("seconds", "peak_memory")  # in the file that of matching
    assert {key: value for key, value in written.items() if key not in cost} == {
        key: value for key, value in run_.items() if key not in ("output", *cost)
    }
    assert 0 < written["seconds"] < run_["seconds"]
    card = (out / "README.md").read_text("utf-8")
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "`a` moved onto `b`" in card
    assert same(Alignment.load(out / "alignment.symfuse")(open_checkpoint("a")), open_checkpoint("out"))
    assert_complete(out, transformers.BertForMaskedLM)
    assert api.verify("a", "out").worst < 1e-12


def test_align_prints_what_was_done(models: Path) -> None:
    text = done("align", "a", "--to", "b", "-o", "out").stdout
    for piece in (
        "proved: outputs equal to",
        "before rounding",
        "a -> b",
        "qk",
        "ffn",
        "% of it)",
        "written to out in",
    ):
        assert piece in text
    text = done("align", "a", "--to", "b", "-o", "unproved", "--no-verify").stdout
    assert "proved:" not in text
    assert json.loads(Path("unproved/symfuse.json").read_text("utf-8"))["verified"] is None


def test_options_of_matching(models: Path) -> None:
    options = data(
        "align", "a", "--to", "b", "-o", "out", "--axes", "qk,ffn", "--layers", "tail:1", "--no-scaling", "--no-biases",
        "--threads", "2", "--one-pass",
    )["options"]  # fmt: skip
    assert options == {"axes": ["qk", "ffn"], "layers": [1], "scaling": False, "one_pass": True, "biases": False}
    elements = Alignment.load("out/alignment.symfuse").elements
    assert sorted(map(str, elements)) == ["ffn[1]", "qk[1]"]


def test_verify(models: Path) -> None:
    done("align", "a", "--to", "b", "-o", "out", "-q")
    found = data("verify", "a", "out")
    keys = {"schema", "equal", "errors", "tolerance", "inputs", "config", "unread", "coverage", "tensors", "notes"}
    assert set(found) == keys
    assert found["equal"] is True
    assert found["config"] == found["unread"] == []
    read, count = found["coverage"]["bert.embeddings.word_embeddings.weight"]
    assert read == count
    assert found["errors"].keys() == {"logits"}
    assert re.search(
        r"equal to .*\ntensors: \d+ differ\nread: all rows of \d tables", done("verify", "a", "out").stdout
    )
    different = run("verify", "a", "b")
    assert different.exit_code == 7
    assert "different to" in different.stdout
    assert json.loads(run("verify", "a", "b", "--json").stdout)["equal"] is False
    assert run("verify", "a", "b", "--tolerance", "100").exit_code == 0
    quiet = run("verify", "a", "b", "--quiet")
    assert quiet.stdout == ""
    assert quiet.stderr.count("\n") == 1


def test_verify_on_text(models: Path) -> None:
    done("align", "a", "--to", "b", "-o", "out", "-q")
    Path("text.txt").write_text("the cat\n\nsat on the mat and the hat of the cat " * 20, "utf-8")
    assert "no tokenizer" in run("verify", "a", "out", "--text", "text.txt").stderr
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "and", "hat", "of"]
    for folder in ("a", "out"):
        vocabulary = {word: i for i, word in enumerate(words)}
        transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    assert data("verify", "a", "out", "--text", "text.txt")["inputs"].startswith("the given inputs")
    assert run("verify", "a", "b", "--text", "text.txt").exit_code == 7
    Path("empty.txt").write_text("\n \n", "utf-8")
    refused(models, 3, "no lines of text", "verify", "a", "out", "--text", "empty.txt")
    Path("bytes.txt").write_bytes(b"\xff\xfe\x00")
    refused(models, 3, "UTF-8", "verify", "a", "out", "--text", "bytes.txt")


def test_distance(models: Path) -> None:
    found = data("relate", "a", "b")
    assert set(found) == {
        "kind", "relation", "source", "anchor", "before", "after", "left", "relative", "cosine", "by_axis", "by_layer",
        "by_layer_and_axis", "by_tensor", "seconds", "peak_memory",
    }  # fmt: skip
    assert found["left"] == pytest.approx(found["after"] / found["before"])
    before = api.relate("a", "b").distance
    assert {row["axis"]: row["before"] for row in found["by_axis"]} == pytest.approx(
        {axis: gap.squared for axis, gap in before.by("axis").items()}
    )
    assert {row["layer"]: row["before"] for row in found["by_layer"]} == pytest.approx(
        {layer: gap.squared for layer, gap in before.by("layer").items()}
    )
    assert all(row["share"] == pytest.approx(row["after"] / row["before"]) for row in found["by_axis"])
    assert "cosine" in done("relate", "a", "b").stdout
    ffn = data("relate", "a", "b", "--axes", "ffn")
    assert {row["axis"]: row["share"] < 1 for row in ffn["by_axis"]} == {
        axis: axis == "ffn" for axis in before.by("axis")
    }


def test_merge(models: Path) -> None:
    run_ = data("merge", "a", "b", "-o", "out", "--weights", "0.3,0.7")
    assert set(run_) == {
        "kind", "symfuse", "method", "paper", "recipe", "merged", "models", "inputs", "weights", "base", "why_base",
        "tokenizer",
        "heads", "seed", "anchor", "align", "alignments", "notes", "warnings", "output", "seconds",
        "peak_memory",
    }  # fmt: skip
    assert (run_["models"], run_["weights"], run_["anchor"], run_["alignments"]) == (
        ["a", "b"],
        {"a": 0.3, "b": 0.7},
        None,
        [],
    )
    assert run_["base"] == "a"
    assert [one["name"] for one in run_["inputs"]] == ["a", "b"]
    assert len({one["sha256"] for one in run_["inputs"]}) == 2
    assert same(open_checkpoint("out"), dict(api.merge(["a", "b"], weights=[0.3, 0.7])))
    assert {path.name for path in Path("out").iterdir()} == {
        "model.safetensors",
        "config.json",
        "symfuse.json",
        "README.md",
    }
    card = Path("out/README.md").read_text("utf-8")
    assert "A linear merge" in card
    assert "Not aligned before the merge." in card
    assert "- `a`, weight 0.3" in card
    assert "- `b`, weight 0.7" in card
    assert_complete(models / "out", transformers.BertForMaskedLM)
    text = done("merge", "a", "b", "-o", "again", "--weights", "1,3", "--no-normalize").stdout
    assert "1·a + 3·b" in text
    assert "0.25·a + 0.75·b" in done("merge", "a", "b", "-o", "more", "--weights", "1,3").stdout


@pytest.mark.parametrize("anchor", ["2", "b", None])
def test_merge_after_alignment(models: Path, anchor: str | None) -> None:
    chosen = [] if anchor is None else ["--anchor", anchor]
    run_ = data("merge", "a", "b", "c", "-o", "out", "--align", "all", *chosen)
    number = api.nearest(["a", "b", "c"]) if anchor is None else 1
    names = ["a", "b", "c"]
    assert run_["anchor"] == names[number]
    others = [i for i in range(3) if i != number]
    assert [one["source"]["name"] for one in run_["alignments"]] == [names[i] for i in others]
    assert {one["anchor"]["name"] for one in run_["alignments"]} == {names[number]}
    assert all(one["verified"]["equal"] for one in run_["alignments"])
    opened = [open_checkpoint(name) for name in names]
    for i in others:
        opened[i] = Alignment.load(f"out/alignment-{i + 1}.symfuse")(opened[i])
    assert not Path(f"out/alignment-{number + 1}.symfuse").exists()
    assert same(open_checkpoint("out"), dict(api.merge(opened)))
    card = Path("out/README.md").read_text("utf-8")
    assert f"Aligned to `{names[number]}` first: axes qk, v, ffn, h, residual" in card


ALIGN = [[], ["--align", "ffn", "--anchor", "1"], ["--align", "ffn", "--anchor", "2"]]


# However the base is named, it is the same one for each way to align: those are slow.
@pytest.mark.parametrize(
    ("base", "align"),
    [
        *itertools.product(["2", None], ALIGN),
        *itertools.product(["b", "1"], ALIGN[:1]),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in itertools.product(["b", "1"], ALIGN[1:])),
    ],
)
def test_config_dtype_and_tokenizer_are_the_base_s(models: Path, base: str | None, align: list[str]) -> None:
    """Which is the first model, whatever the anchor."""
    for name, dtype in (("a", torch.float64), ("b", torch.float32)):
        shutil.copytree(name, f"{name}_")
        shutil.rmtree(name)
        checkpoint = open_checkpoint(f"{name}_").to(dtype)
        checkpoint.replace(config={**checkpoint.config, "nickname": name}).save(name)
        Path(name, "vocab.txt").write_text(name, "utf-8")
    chosen = [] if base is None else ["--base", base]
    run_ = data("merge", "a", "b", "-o", "out", *align, *chosen)
    number = 1 if base in ("2", "b") else 0
    name = "ab"[number]
    out = open_checkpoint("out")
    assert run_["base"] == name
    assert out.config["nickname"] == name
    assert Path("out/vocab.txt").read_text("utf-8") == name
    assert {out.info(tensor).dtype for tensor in out} == {torch.float32 if number else torch.float64}
    text = done("merge", "a", "b", "-o", "again", *align, *chosen).stdout
    assert f"config, dtypes and tokenizer of {name}" in text


@pytest.mark.parametrize("heads", ["tagger", "2"])
@pytest.mark.parametrize("align", ALIGN)
def test_heads(models: Path, heads: str, align: list[str]) -> None:
    done("merge", "a", "tagger", "-o", "out", "--task-heads", heads, *align)
    assert_complete(models / "out", transformers.BertForTokenClassification)
    assert torch.equal(open_checkpoint("out")["classifier.weight"], open_checkpoint("tagger")["classifier.weight"])
    refused(models, 5, "classifier.weight: absent and (7, 20)", "merge", "a", "tagger", "-o", "no", *align)


def test_the_model_whose_head_is_kept_is_the_base(models: Path) -> None:
    assert data("merge", "a", "tagger", "-o", "out", "--task-heads", "2")["base"] == "tagger"
    refused(models, 2, "must be the base", "merge", "a", "tagger", "-o", "no", "--task-heads", "2", "--base", "1")


def test_tokenizers_that_differ_are_told(models: Path) -> None:
    for name, words in (("a", "one two"), ("b", "two one")):
        Path(name, "vocab.txt").write_text(words, "utf-8")
    note = "note: vocab.txt of b and a differ; those of a are used"
    assert note in done("merge", "a", "b", "-o", "out").stdout
    Path("b", "vocab.txt").write_text("one two", "utf-8")
    assert "note:" not in done("merge", "a", "b", "-o", "again").stdout


def test_without_a_proof_none_is_claimed(models: Path) -> None:
    assert "not proved (--no-verify)" in done("align", "a", "--to", "b", "-o", "out", "--no-verify").stdout
    assert "It was not checked" in Path("out/README.md").read_text("utf-8")
    done("align", "a", "--to", "b", "-o", "proved")
    assert "changed no output is proved to" in Path("proved/README.md").read_text("utf-8")


def test_a_result_can_be_used_again_without_notes(models: Path) -> None:
    done("align", "a", "--to", "b", "-o", "out", "-q")
    result = done("inspect", "out")
    assert result.stderr == ""


def test_quiet_says_nothing(models: Path) -> None:
    (models / "a" / "old.bin").write_bytes(b"")  # of which a note would be made
    assert "ignored" in done("inspect", "a").stderr
    for args in (
        ["inspect", "a"],
        ["align", "a", "--to", "b", "-o", "out"],
        ["verify", "a", "out"],
        ["relate", "a", "b"],
        ["merge", "a", "b", "-o", "merged", "--align", "all"],
    ):
        assert done(*args, "--quiet").output == ""
    assert done("inspect", "a", "-q", "--json").stdout.startswith("{")
    assert run("inspect", "nowhere", "-q").stderr != ""


def test_json_is_alone_on_stdout(models: Path) -> None:
    for args in (["align", "a", "--to", "b", "-o", "out"], ["merge", "a", "b", "-o", "merged", "--align", "ffn"]):
        text = done(*args, "--json").stdout
        assert text.startswith("{\n")
        json.loads(text)


def test_identical_models_divide_nothing_by_zero(models: Path) -> None:
    found = data("relate", "a", "a")
    assert (found["before"], found["after"], found["left"]) == (0, 0, 1)
    assert all(row["share"] == 1 for row in found["by_axis"])
    run_ = data("align", "a", "--to", "a", "-o", "out")
    assert [row["moved"] for row in run_["matched"]] == [0, 0, 0]
    assert same(open_checkpoint("out"), open_checkpoint("a"))


# ---- refusals


BAD = [
    (3, "does not exist", ["inspect", "nowhere"]),
    (3, "does not exist", ["align", "nowhere", "--to", "b", "-o", "out"]),
    (3, "does not exist", ["align", "a", "--to", "nowhere", "-o", "out"]),
    (3, "does not exist", ["merge", "a", "nowhere", "-o", "out"]),
    (5, "one is a bert, the other a gpt2", ["align", "a", "--to", "gpt2", "-o", "out"]),
    (5, "one is a bert, the other a gpt2", ["merge", "a", "gpt2", "-o", "out"]),
    (5, "hidden sizes", ["merge", "a", "wide", "-o", "out", "--align", "all"]),
    (5, "hidden sizes", ["relate", "a", "wide"]),
    (5, "the same outputs", ["verify", "a", "tagger"]),
    (2, "3 weights for 2 models", ["merge", "a", "b", "-o", "out", "--weights", "1,2,3"]),
    (2, "numbers separated by commas", ["merge", "a", "b", "-o", "out", "--weights", "1;2"]),
    (2, "sum to zero", ["merge", "a", "b", "-o", "out", "--weights", "1,-1"]),
    (2, "less than zero", ["merge", "a", "b", "-o", "out", "--weights", "0.3,-0.7"]),
    (2, "not known", ["merge", "a", "b", "-o", "out", "--method", "mean"]),
    (2, "not known", ["merge", "a", "b", "-o", "out", "--align", "everything"]),
    (2, "'resid' is not known (did you mean 'residual'?)", ["align", "a", "--to", "b", "-o", "out", "--axes", "resid"]),
    (2, "layers 0 to 1", ["align", "a", "--to", "b", "-o", "out", "--layers", "7"]),
    (2, "does not parse", ["relate", "a", "b", "--layers", "first"]),
    (2, "1 (a), 2 (b)", ["merge", "a", "b", "-o", "out", "--align", "all", "--anchor", "3"]),
    (2, "1 (a), 2 (b)", ["merge", "a", "b", "-o", "out", "--task-heads", "c"]),
    (2, "--base '3'", ["merge", "a", "b", "-o", "out", "--base", "3"]),
    (2, "--base 'c'", ["merge", "a", "b", "-o", "out", "--base", "c"]),
    (2, "--anchor 'c'", ["merge", "a", "b", "-o", "out", "--align", "all", "--anchor", "c"]),
    (2, "--anchor: without --align", ["merge", "a", "b", "-o", "out", "--anchor", "2"]),
    (2, "--layers: without --align", ["merge", "a", "b", "-o", "out", "--layers", "0"]),
    (2, "--no-scaling: without --align", ["merge", "a", "b", "-o", "out", "--no-scaling"]),
    (2, "--one-pass: without --align", ["merge", "a", "b", "-o", "out", "--one-pass"]),
    (2, "--no-biases: without --align", ["merge", "a", "b", "-o", "out", "--no-biases"]),
    (2, "--no-verify: without --align", ["merge", "a", "b", "-o", "out", "--no-verify"]),
    (2, "--layers, --one-pass: without", ["merge", "a", "b", "-o", "out", "--layers", "0", "--one-pass"]),
    (2, "layers 0 to 1", ["merge", "a", "b", "-o", "out", "--align", "all", "--layers", "7"]),
    (2, "is not a size", ["merge", "a", "b", "-o", "out", "--max-shard-size", "large"]),
    (2, "is not a size", ["align", "a", "--to", "b", "-o", "out", "--max-shard-size", "large"]),
    (2, "'--threads'", ["align", "a", "--to", "b", "-o", "out", "--threads", "0"]),
    (2, "'--to'", ["align", "a", "-o", "out"]),
    (2, "'--output'", ["align", "a", "--to", "b"]),
    (2, "No such command", ["blend"]),
    (2, "No such option", ["inspect", "a", "--loud"]),
    (8, "exists", ["align", "a", "--to", "b", "-o", "c"]),
    (8, "exists", ["merge", "a", "b", "-o", "c"]),
    (8, "is the input", ["merge", "a", "b", "-o", "a", "--overwrite"]),
    (8, "is the input", ["merge", "a", "b", "-o", "b", "--overwrite"]),
    (8, "lies inside the input", ["merge", "a", "b", "-o", "b/out"]),
    (8, "holds the input", ["align", "a", "--to", "b", "-o", ".", "--overwrite"]),
    (8, "is a file", ["align", "a", "--to", "b", "-o", "a.txt"]),
]


@pytest.mark.parametrize(("code", "message", "args"), BAD, ids=[" ".join(args) for _, _, args in BAD])
def test_refusals(models: Path, code: int, message: str, args: list[str]) -> None:
    Path("a.txt").write_text("text", "utf-8")
    refused(models, code, message, *args)


def test_damaged_and_undeclared_models(models: Path) -> None:
    weights = Path("a/model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused(models, 3, "model.safetensors", "merge", "a", "b", "-o", "out")
    weights.write_bytes(whole)
    config = json.loads(Path("a/config.json").read_text("utf-8"))
    Path("a/config.json").write_text(json.dumps(config | {"model_type": "martian"}), "utf-8")
    refused(models, 4, "martian", "align", "a", "--to", "b", "-o", "out")
    Path("a/config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}), "utf-8")
    refused(models, 4, "missing: bert.encoder.layer.2", "merge", "a", "b", "-o", "out")


def test_nan_is_found_and_nothing_left(models: Path) -> None:
    name = "bert.embeddings.LayerNorm.weight"  # which no axis that is matched touches
    a = open_checkpoint("a")
    bad = dict(a) | {name: torch.full((20,), torch.nan, dtype=torch.float64)}
    open_checkpoint(bad, config=a.config).save("bad")
    message = f"'{name}' of bad/model.safetensors holds 20 NaN"
    refused(models, 3, message, "align", "bad", "--to", "b", "-o", "out", "--no-verify", "-q")
    refused(models, 3, message, "merge", "a", "bad", "-o", "out", "-q")
    refused(models, 3, message, "relate", "bad", "b", "-q")


def test_what_a_refused_run_leaves_is_said(models: Path) -> None:
    a = open_checkpoint("a")
    last = list(a)[-1]
    open_checkpoint(dict(a) | {last: a[last] * torch.nan}, config=a.config).save("bad")
    result = run("merge", "a", "bad", "-o", "out", "-q", "--resume", "--threads", "1")
    assert result.exit_code == 3
    error, note = result.stderr.splitlines()
    assert f"'{last}' of bad/model.safetensors holds" in error
    [folder] = models.glob(".out.partial-*")
    words = rf"symfuse: \d+ of {len(a)} tensors are kept in {folder}: run again with resume to continue, .*"
    assert re.fullmatch(words, note)


VERBS = [["align", "a", "--to", "b"], ["merge", "a", "b", "--align", "all"]]


def wrong(alignment: Alignment) -> Alignment:
    """One element that is not orthogonal: the queries move by M, the keys by M instead of M⁻ᵀ."""
    instance = next(i for i in alignment.elements if i.axis == "qk")
    element = alignment.elements[instance]
    assert isinstance(element, Similarity)
    broken = Similarity(element.matrix * 1.01)
    return replace(alignment, elements={**alignment.elements, instance: broken})


@pytest.mark.parametrize("args", VERBS, ids=["align", "merge"])
def test_c52_an_alignment_that_fails_its_proof_is_not_written(
    models: Path, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    for module in (api.aligning, aligning):
        match = module.match_pair
        monkeypatch.setattr(module, "match_pair", lambda *a, match=match, **k: wrong(match(*a, **k)))
    before = everything(models)
    result = run(*args, "-o", "out")
    assert result.exit_code == 7
    assert "a after alignment: output 'logits' differs by" in result.stderr
    assert "nothing was written" in result.stderr
    assert everything(models) == before
    monkeypatch.undo()
    os.chdir(models)
    assert run(*args, "-o", "out").exit_code == 0


@pytest.mark.parametrize("case", ["same", "relative", "link", "parent read-only", "file", "exists"])
@pytest.mark.parametrize("verb", VERBS, ids=["align", "merge"])
def test_c97_c100_the_target_is_checked_before_any_work(
    models: Path, monkeypatch: pytest.MonkeyPatch, case: str, verb: list[str]
) -> None:
    Path("file").write_text("x", "utf-8")
    Path("link").symlink_to(models / "a")
    locked = models / "locked"
    locked.mkdir()
    (locked / "keep").write_text("x", "utf-8")
    target = {
        "same": str(models / "a"), "relative": "b/../a", "link": "link", "parent read-only": "locked/out",
        "file": "file", "exists": "c",
    }[case]  # fmt: skip
    if case == "parent read-only":  # whoever runs the tests: root may write everywhere
        real = os.access
        monkeypatch.setattr(os, "access", lambda path, *a, **k: Path(path) != locked and real(path, *a, **k))

    def never(*_args: object, **_options: object) -> None:
        raise AssertionError("work was done before the target was checked")

    for module in (api.aligning, aligning):
        monkeypatch.setattr(module, "match_pair", never)
    monkeypatch.setattr(aligning, "prove", never)
    flags = ["--overwrite"] if case != "exists" else []
    refused(models, 8, "", *verb, "-o", target, *flags)


def test_overwrite(models: Path) -> None:
    shutil.copy("b/config.json", "c/old.json")
    refused(models, 8, "not part of a model: old.json", "merge", "a", "b", "-o", "c", "--overwrite", "-q")
    Path("c/old.json").rename("c/tokenizer.json")
    done("merge", "a", "b", "-o", "c", "--overwrite", "-q")
    assert same(open_checkpoint("c"), dict(api.merge(["a", "b"])))
    assert not Path("c/tokenizer.json").exists()
    assert {path.name for path in models.iterdir()} == {"a", "b", "c", "tagger", "gpt2", "wide"}
    shutil.rmtree("b/")
    Path("b").mkdir()
    Path("b/notes.txt").write_text("mine", "utf-8")
    refused(models, 8, "not a model folder", "align", "a", "--to", "c", "-o", "b", "--overwrite")


def test_shards(models: Path) -> None:
    done("merge", "a", "b", "-o", "out", "--align", "all", "--max-shard-size", "20KB", "-q")
    assert len(list(Path("out").glob("model-*.safetensors"))) > 2
    assert_complete(models / "out", transformers.BertForMaskedLM)
    assert done("inspect", "out").stderr == ""


@pytest.mark.parametrize("stage", ["match", "prove"])
def test_an_interrupt_ends_with_130_and_leaves_nothing(
    models: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*{"match": (api.aligning, "match_pair"), "prove": (aligning, "prove")}[stage], interrupt)
    refused(models, 130, "interrupted", "align", "a", "--to", "b", "-o", "out", "-q")


def test_an_interrupt_in_the_writing_leaves_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Alignment.move

    def interrupt(self: Alignment, name: str, tensor: Tensor) -> Tensor:
        if name == "encoder.layer.1.output.dense.weight" and list(models.glob(".out.partial*")):
            raise KeyboardInterrupt
        return read(self, name, tensor)

    monkeypatch.setattr(Alignment, "move", interrupt)
    refused(models, 130, "interrupted", "align", "a", "--to", "b", "-o", "out", "-q")


# ---- as a process


def process(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from symfuse.cli import main; sys.argv[0] = 'symfuse'; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=cwd)


def test_exit_codes_of_the_process(models: Path) -> None:
    right = process("inspect", "a", "--json", cwd=models)
    assert right.returncode == 0
    assert json.loads(right.stdout)["family"] == "bert"
    assert right.stderr == ""
    for code, args in ((2, ["inspect"]), (5, ["merge", "a", "gpt2", "-o", "out"])):
        found = process(*args, cwd=models)
        assert found.returncode == code
        assert found.stdout == ""
        assert "Traceback" not in found.stderr


# What a start must not import: seconds, or the modules of all verbs.
HEAVY = (
    "torch", "transformers", "numpy", "scipy", "rich", "yaml", "safetensors", "huggingface_hub",
    *(f"symfuse.cli.{module}" for module in ("recipes", *sorted({module for module, _ in LISTED.values()}))),
)  # fmt: skip


def test_importing_symfuse_imports_nothing_else_of_it() -> None:
    code = f"import sys, symfuse\nprint([m for m in sys.modules if m.startswith('symfuse.') or m in {HEAVY}])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_list_of_verbs_is_what_their_modules_register() -> None:
    for name, (module, line) in LISTED.items():
        command = main.commands[name]
        assert command.callback is not None
        assert command.callback.__module__ == f"symfuse.cli.{module}"
        assert (command.help or "").split("\n\n")[0].replace("\n", " ") == line
    registered = sum(p.read_text("utf-8").count("@main.command") for p in Path(cli.__file__).parent.glob("*.py"))
    assert registered == len(LISTED)
    with pytest.raises(KeyError):
        main.commands["nothing"]


def test_help_is_quick_and_complete(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['symfuse', '--help']\n"
        "from symfuse.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print([m for m in {HEAVY} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0
    assert found.stdout.splitlines()[-1] == "[]"
    assert set(main.commands) == {
        "inspect", "align", "verify", "relate", "merge", "methods", "check", "extract-lora", "demo", "barrier",
        "collect", "evaluate", "landscape", "rebase", "report", "rewrite", "suggest", "transport",
    }  # fmt: skip
    for name in main.commands:
        assert name in found.stdout
        text = done(name, "--help").output
        assert text.startswith(f"Usage: main {name}")
    assert "0.1.0" in done("--version").output


def test_an_import_that_fails_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ModuleNotFoundError, match=r"symfuse\.martian"):
        import_at_once("martian")
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("args", "read"),
    [(["r.yml", "old", "--overwrite"], ["r.yml"]), (["a", "b", "-o", "old", "--overwrite"], ["a", "b"])],
    ids=["recipe", "models"],
)
def test_only_inputs_are_read_ahead(
    models: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], read: list[str]
) -> None:
    (models / "r.yml").write_text("models: [{model: a}, {model: b}]\nmerge_method: linear\n", "utf-8")
    shutil.copytree("a", "old")
    asked: list[str] = []
    assert main.commands["merge"].callback is not None
    monkeypatch.setitem(vars(sys.modules["symfuse.cli.merge"]), "read_ahead", asked.extend)
    done("merge", *args)
    assert asked == read


def test_every_option_has_a_help() -> None:
    missing = [
        f"{name} {option.opts[0]}"
        for name, command in main.commands.items()
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert missing == []


def test_align_from_activations_and_the_anchor_in_the_frame(models: Path) -> None:
    for seed, name in enumerate(("g", "h")):
        MODELS["gpt2-lm"](seed).save(models / name)
    done("align", "g", "--to", "h", "-o", "out", "--axes", "residual,heads", "--anchor-output", "framed", "-q")
    found = Alignment.load("out/alignment.symfuse")
    assert found.frame == ("untie", "fold_norms", "centre", "drop_gauges")
    assert api.verify("h", "framed").equal
    assert api.verify("g", "out").equal
    assert (
        api.relate("out", "framed").distance.relative
        < api.relate(found.in_frame(open_checkpoint("g")), "framed").distance.relative
    )
    refused = run("align", "g", "--to", "h", "-o", "out2", "--from", "activations")
    assert refused.exit_code == 2
    assert "--from activations and --from learned need --data" in refused.stderr
    assert not Path("out2").exists()


def test_a_memory_without_a_unit_is_a_slip(tmp_path: Path) -> None:
    result = run("align", str(tmp_path), "--to", str(tmp_path), "-o", str(tmp_path / "out"), "--memory", "6")
    assert result.exit_code == 2
    assert "--memory 6 is 6 bytes" in result.stderr


@pytest.mark.parametrize("words", [["merge", "a", "b", "-o", "out"], ["align", "a", "--to", "b", "-o", "out"]])
def test_reading_options_imports_nothing_heavy(words: list[str]) -> None:
    """So that weights are read ahead while torch is imported, and that without collecting garbage."""
    code = (
        "import sys; from symfuse.cli.app import main; verb, *words = sys.argv[1:]; "
        "main.commands[verb].make_context(verb, words); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
