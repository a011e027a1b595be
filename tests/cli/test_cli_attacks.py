"""The command line under attack: results that would be destroyed or put into inputs, options that would be ignored,
words that mean nothing, and what a user needs to go on."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import data, done, everything, run
from contract.tiny import GPT2, MODELS, TEXT, of
from evaluation.task_cases import byte_level, wordpiece
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import OptionError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint

GPT = "untie, fold_norms, centre, drop_gauges"
PATH = ("--data", "t.txt", "--points", "3", "--refine", "0")


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("attacked")
    for seed, name in enumerate("ab"):
        of("BertForMaskedLM", "BertConfig", TEXT)(seed).replace(files=wordpiece()).save(root / name)
    for seed, name in enumerate("gh"):
        of("GPT2LMHeadModel", "GPT2Config", GPT2)(seed).replace(files=byte_level()).save(root / name)
    MODELS["llama-lm"](0).save(root / "l") if "llama-lm" in MODELS else None
    (root / "t.txt").write_text("the cat sat\non the mat\nand the hat\n", "utf-8")
    return root


def refused(folder: Path, code: int, message: str, *args: str) -> None:
    """The command ends with that code and one message, and leaves the working folder as it was."""
    before, names = everything(folder), sorted(folder.rglob("*"))
    result = run(*args)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert message in " ".join(result.stderr.split())  # click wraps lines
    assert everything(folder) == before
    assert sorted(folder.rglob("*")) == names


def never(*_args: object, **_options: object) -> None:
    raise AssertionError("work was done first")


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return set(a) == set(b) and all(a[name].equal(b[name]) for name in a)


# ---- where results go


@pytest.mark.parametrize(
    ("output", "anchor", "relation"),
    [
        ("o", "o", "is"),
        ("o", "./o/../o/", "is"),
        ("o/x", "o", "holds"),
        ("o", "o/x", "lies inside"),
    ],
)
def test_the_anchor_never_replaces_the_result(
    place: Path, monkeypatch: pytest.MonkeyPatch, output: str, anchor: str, relation: str
) -> None:
    done("align", "g", "--to", "h", "-o", "o", "--axes", "ffn", "-q")
    monkeypatch.setattr(api, "match", never)
    message = f"--anchor-output {Path(anchor)} {relation} the output {Path(output)}"
    flags = ["--overwrite"] if output == "o" else []
    if output != "o":
        shutil.rmtree("o")
    refused(place, 8, message, "align", "g", "--to", "h", "-o", output, "--anchor-output", anchor, *flags)


@pytest.mark.parametrize("failing", ["o", "framed"])
def test_neither_the_result_nor_the_anchor_is_left_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save = Checkpoint.save

    def full(self: Checkpoint, target: Path, **options: Any) -> Path:
        if str(target) == failing:
            raise OSError(28, "No space left on device")
        return save(self, target, **options)

    monkeypatch.setattr(Checkpoint, "save", full)
    args = ("align", "g", "--to", "h", "-o", "o", "--axes", "residual", "--anchor-output", "framed", "-q")
    result = run(*args, "--no-verify")
    assert result.exit_code == 1
    assert not Path("o").exists()
    assert not Path("framed").exists()


VERBS = {
    "distance": ["relate", "a", "b"],
    "evaluation": ["evaluate", "a", "b", "--data", "t.txt"],
    "barrier": ["barrier", "a", "b", *PATH],
    "landscape": ["landscape", "a", "b", "--data", "t.txt", "--steps", "2"],
}


@pytest.mark.parametrize("kind", VERBS)
def test_results_are_put_into_no_input(place: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("symfuse.api.open_checkpoint", never)
    refused(place, 8, f"the folder a for {kind}.json is the input a", *VERBS[kind], "-o", "a")
    refused(place, 8, "is the input b", *VERBS[kind], "-o", "a/../b")
    refused(place, 8, "a/run for", *VERBS[kind], "-o", "a/run")
    refused(place, 2, "the name is empty", *VERBS[kind], "-o", "")


def test_a_result_may_stand_beside_the_models(place: Path) -> None:
    done("relate", "a", "b", "-o", ".", "-q")
    assert Path("distance.json").is_file()


@pytest.mark.parametrize(
    "args", [["align", "a", "--to", "b"], ["merge", "a", "b"], ["check", "a", "b"]], ids=["align", "merge", "check"]
)
def test_an_empty_name_is_not_the_working_folder(place: Path, args: list[str]) -> None:
    refused(place, 2, "the name is empty", *args, "-o", "", "--overwrite")


def test_an_empty_name_beside_a_recipe(place: Path) -> None:
    Path("r.yml").write_text("models: [{model: a}, {model: b}]\nmerge_method: linear\n", "utf-8")
    refused(place, 2, "the name of the folder to write is empty", "merge", "r.yml", "", "--overwrite")


# ---- words


@pytest.mark.parametrize("args", [["align", "a", "--to", "b", "-o", "o"], ["relate", "a", "b"]])
def test_auto_is_no_axis(place: Path, args: list[str]) -> None:
    refused(place, 2, "axis 'auto' is not known", *args, "--group", "auto=none")
    refused(place, 2, "auto stands alone", *args, "--axes", "auto,ffn")
    refused(place, 2, "choose from auto, qk", *args, "--axes", "everything")
    refused(
        place, 2, "this bert has no such axis, so that there is nothing to match; it has qk", *args, "--axes", "pooler"
    )
    with_more = done(*args, "--axes", "pooler,ffn", "-q")  # a model without one of several is no mistake
    assert with_more.output == ""


def recipe(**align: Any) -> str:
    text = yaml.safe_dump({"align": align}, sort_keys=False)
    return f"models: [{{model: a}}, {{model: b}}]\nmerge_method: linear\n{text}"


NOTHING = [
    ({"axes": "ffn", "groups": {"ffn": "none"}}, "every axis is taken out"),
    ({"groups": {"all": "none"}}, "every axis is taken out"),
    ({"axes": "pooler"}, "has no such axis"),
    ({"axes": "ffn", "groups": {"ffn": "orthogonal"}}, "is no part of what may act on axis 'ffn'"),
]


@pytest.mark.parametrize(("align", "message"), NOTHING)
def test_check_refuses_what_merge_refuses(place: Path, align: dict[str, Any], message: str) -> None:
    Path("r.yml").write_text(recipe(**align), "utf-8")
    for args in (["check", "r.yml", "-o", "o"], ["merge", "r.yml", "o"]):
        result = run(*args)
        assert result.exit_code == 2, result.output
        assert message in result.output
        line = 4 + list(align).index("axes" if "axes" in align else "groups")
        assert f"r.yml, line {line}: align." in result.output
        assert not Path("o").exists()


@pytest.mark.parametrize(
    ("align", "message"),
    [({"groups": {"auto": "none"}}, "axis 'auto' is not known"), ({"axes": ["auto", "ffn"]}, "auto stands alone")],
)
def test_recipes_have_the_same_words(place: Path, align: dict[str, Any], message: str) -> None:
    Path("r.yml").write_text(recipe(**align), "utf-8")
    refused(place, 2, message, "merge", "r.yml", "o")
    refused(place, 2, message, "check", "r.yml", "-o", "o")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--limit", "3"), ("--column", "text=x"), ("--task", "masked-lm"), ("--encoding", "latin-1"), ("--seed", "0"),
     ("--batch-size", "2"), ("--max-length", "9"), ("--pooling", "cls")],
)  # fmt: skip
def test_no_option_is_ignored(place: Path, option: str, value: str) -> None:
    message = f"{option}: only for --from activations; leave it out, or add --from activations"
    refused(place, 2, message, "align", "a", "--to", "b", "-o", "o", option, value)


# ---- alignments from files


def test_barrier_takes_the_folder_that_align_wrote(place: Path) -> None:
    done("align", "a", "--to", "b", "-o", "moved", "--axes", "ffn", "-q")
    found = data("barrier", "a", "b", *PATH, "--align", "mine=moved", "--align", "ffn")
    curves = {curve["name"]: curve for curve in found["curves"]}
    assert curves["mine"]["points"] == curves["ffn"]["points"]
    done("landscape", "a", "b", "--data", "t.txt", "--steps", "2", "--align", "mine=moved", "-q")


def test_alignments_that_are_not_there(place: Path) -> None:
    done("merge", "a", "b", "-o", "merged", "--align", "ffn", "-q")
    for align, code, message in (
        ("mine=b", 3, "b/alignment.symfuse does not exist"),
        ("mine=merged", 3, "there are alignment-1.symfuse"),
        ("mine=gone", 3, "gone does not exist"),
        ("mine=t.txt", 3, "NAME=FOLDER is what `align` wrote"),
        ("", 2, "it is empty; choose from auto, permutation, rotation, scaling"),
        ("mine=", 2, "the folder is missing"),
        ("=moved", 2, "the name is missing"),
        ("auto,ffn", 2, "auto stands alone"),
        ("everything", 2, "choose from auto, permutation"),
    ):
        refused(place, code, message, "barrier", "a", "b", *PATH, "--align", align)
        refused(place, code, message, "landscape", "a", "b", "--data", "t.txt", "--align", align)


def test_auto_is_the_usual_curve(place: Path) -> None:
    found = data("barrier", "a", "b", *PATH)
    plain, auto = found["curves"]
    assert (plain["name"], plain["alignment"], auto["name"]) == ("none", None, "auto")
    assert auto["alignment"]["axes"] == data("align", "a", "--to", "b", "-o", "o")["options"]["axes"]
    assert {"auto", "layers", "scaling"} <= set(auto["alignment"])
    assert (auto["alignment"]["from"], auto["alignment"]["frame"], auto["alignment"]["variants"]) == ("weights", [], [])
    plane = data("landscape", "a", "b", "--data", "t.txt", "--steps", "2")
    again = data("landscape", "a", "b", "--data", "t.txt", "--steps", "2", "--align", "auto")
    assert plane["models"] == again["models"]
    for verb in ("barrier", "landscape"):
        assert "Default: auto" in " ".join(done(verb, "--help").output.split())


def test_a_curve_in_a_frame_says_so(place: Path) -> None:
    done("align", "g", "--to", "h", "-o", "moved", "--axes", "residual", "-q")
    found = data("barrier", "g", "h", *PATH, "--align", "mine=moved", "--align", "ffn")
    curves = {curve["name"]: curve for curve in found["curves"]}
    assert list(curves) == ["none", "mine", "none, same frame", "ffn"]
    assert curves["none, same frame"]["alignment"] == {"frame": GPT.split(", ")}
    assert curves["mine"]["alignment"]["axes"] == ["residual"]
    assert curves["mine"]["alignment"]["frame"] == GPT.split(", ")
    assert curves["ffn"]["alignment"]["frame"] == []


def test_two_frames_have_two_plain_curves() -> None:
    g, h = (MODELS["gpt2-lm"](seed) for seed in (0, 1))
    frames = {"one": ("untie", "fold_norms"), "two": ("untie", "fold_norms", "centre")}
    alignments = {name: api.match(g, h, axes="ffn", frame=frame) for name, frame in frames.items()}
    found = api.barrier(g, h, lambda module: float(next(module.parameters()).sum()), alignments, points=3, refine=0)
    assert list(found.curves) == ["none", "one", "none, same frame", "two", "none, frame of two"]
    assert found.baselines["two"] == ("none, frame of two", "none")


def test_an_alignment_without_options_is_traced(place: Path) -> None:
    random_alignment(api.declare("a"), 3, axes=("ffn",)).save("random.safetensors")
    found = data("barrier", "a", "b", *PATH, "--align", "r=random.safetensors")
    assert found["curves"][1]["alignment"]["provenance"] == {"random": 3}


# ---- what is said


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["check", "a", "g"], 5, "symfuse: a and g: one is a bert, the other a gpt2"),
        (["verify", "a", "b"], 7, "symfuse: a and b are different: "),
    ],
)
def test_what_is_wrong_is_said_quietly_too(place: Path, args: list[str], code: int, message: str) -> None:
    refused(place, code, message, *args, "-q")


def test_merge_warns_of_unrelated_models(place: Path) -> None:
    result = done("merge", "a", "b", "-o", "o")
    assert "warning: b and a have no relation in this basis (cosine" in result.stdout
    assert "--align auto" in result.stdout
    assert any("--align auto" in text for text in data("check", "a", "b")["recipes"][0]["warnings"])
    assert "have no relation in this basis" in done("merge", "a", "b", "-o", "p", "-q").stderr
    assert "have no relation in this basis" not in done("merge", "a", "b", "-o", "q", "--align", "auto").output
    shutil.copytree("a", "c")
    assert "have no relation in this basis" not in done("merge", "a", "c", "-o", "s").output


def test_merge_says_once_whose_config_it_is(place: Path) -> None:
    text = done("merge", "a", "b", "-o", "o").stdout
    assert text.count("config") == 1, text


def test_the_card_says_axes_and_frame(place: Path) -> None:
    run_ = data("merge", "g", "h", "-o", "o", "--align", "auto", "--no-verify")
    (one,) = run_["alignments"]
    assert run_["align"]["axes"] == one["options"]["axes"]
    assert "residual" in run_["align"]["axes"]
    assert run_["align"]["frame"] == one["frame"] == GPT.split(", ")
    assert not run_["align"]["auto"]["same_basis"]
    assert json.loads(Path("o/symfuse.json").read_text("utf-8"))["align"] == run_["align"]
    card = Path("o/README.md").read_text("utf-8")
    assert f"first: axes {', '.join(one['options']['axes'])}; in the frame {GPT} (" in card
    assert "norms folded" in card
    assert "head untied" in card
    assert data("merge", "g", "h", "-o", "p")["align"] is None


def test_the_anchor_in_the_frame_says_what_it_is(place: Path) -> None:
    done("align", "g", "--to", "h", "-o", "o", "--axes", "residual", "--anchor-output", "framed", "-q")
    found = json.loads(Path("framed/symfuse.json").read_text("utf-8"))
    assert (found["kind"], found["frame"], found["source"]["name"]) == ("frame", GPT.split(", "), "h")
    card = Path("framed/README.md").read_text("utf-8")
    assert f"`h` in the frame {GPT} (" in card
    assert "proved" not in card
    assert f"; in the frame {GPT}" in Path("o/README.md").read_text("utf-8")


@pytest.mark.parametrize("flag", ["-q", "--json", None])
def test_the_way_to_merge_with_the_anchor_is_said(place: Path, flag: str | None) -> None:
    flags = [] if flag is None else [flag]
    Path("h").rename("the anchor")
    result = done("align", "g", "--to", "the anchor", "-o", "o", "--axes", "residual", *flags)
    refused(place, 5, "folded", "merge", "o", "the anchor", "-o", "merged")
    text = result.stdout if flag is None else result.stderr
    (line,) = (line for line in text.splitlines() if "symfuse align" in line)
    program, *args = shlex.split(line.partition("frame: ")[2])
    assert program == "symfuse"
    done(*args, "-q")
    framed = Alignment.load("o/alignment.symfuse").in_frame(open_checkpoint("the anchor"))
    assert same(open_checkpoint(args[-1]), framed)
    done("merge", "o", args[-1], "-o", "merged", "-q")


def test_tables_have_what_says_something(place: Path) -> None:
    text = done("align", "a", "--to", "b", "-o", "o").stdout
    assert "condition" not in text
    assert text.count("sweeps from") == 1
    descents = json.loads(Path("o/symfuse.json").read_text("utf-8"))["descents"]
    assert len(descents) > 1
    best = min((curve[-1], start) for start, curve in descents.items() if "round" not in start)[1]
    assert f"sweeps from {best}:" in text
    assert "condition" in done("align", "a", "--to", "b", "-o", "p", "--group", "qk=invertible").stdout


def test_inspect_says_what_may_become_of_the_residual_stream(place: Path) -> None:
    text = done("inspect", "g").stdout
    assert "residual: may be rotated in a frame (head untied, norms folded, writers centred, gauges dropped)" in text
    assert "may be rotated" not in done("inspect", "a").stdout
    assert ("not yet:" in text) == ("not yet" in text.partition("not yet:")[0])
    assert ("never:" in text) == ("never" in text.partition("never:")[0])


# ---- in Python


def test_heads_are_numbered_from_0_in_python() -> None:
    a, tagger = MODELS["bert-mlm"](0), MODELS["bert-token"](0)
    assert same(api.merge([a, tagger], heads=1), api.merge([a, tagger], heads=tagger.name or "2"))
    assert "classifier.weight" in api.merge([a, tagger], heads=1)
    assert "classifier.weight" not in api.merge([a, tagger], heads=0)
    for number in (2, -1):
        with pytest.raises(OptionError, match=f"heads {number}: there are models 0 to 1"):
            api.merge([a, tagger], heads=number)
    with pytest.raises(OptionError, match=r"heads 'x': .* the number or name of one model: 1 \("):
        api.merge([a, tagger], heads="x")
