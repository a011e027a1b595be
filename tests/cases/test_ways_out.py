"""What a new user stumbles over: that it is said, that the message names the way out, and that the way out works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import transformers
import yaml

import symfuse
from command import done, run
from contract.tiny import MODELS
from recipes.llama import COMMON, UNKNOWN, llama, tensors_of, unknown
from symfuse.cli import main
from symfuse.errors import CheckpointError
from symfuse.recipes import parse_recipe, read_recipes
from symfuse.rewriting.vocabulary import compare

EXAMPLES = Path(__file__).parents[2] / "examples"
OTHER = [*COMMON[:3], *(f"z{i}" for i in range(50))]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        llama(root / name, seed)
        MODELS["bert-mlm"](seed).save(root / f"bert{seed}")
    llama(root / "other", 2, pieces=OTHER)
    llama(root / "larger", 3, rows=66, pieces=[*COMMON, *(f"u{i}" for i in range(11))], added=["<x>", "<y>"])
    llama(root / "bare", 4)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "bare" / name).unlink()
    unknown(root / "strange", 6)
    llama(root / "eps", 5, rms_norm_eps=1e-3)
    MODELS["bert-mlm"](2).save(root / "bert2")
    torch.manual_seed(6)
    config = transformers.BertConfig.from_pretrained(root / "bert2")
    for pooled in (False, True):
        encoder = transformers.BertModel(config, add_pooling_layer=pooled)
        encoder.save_pretrained(root / ("pooled" if pooled else "encoder"))
    return root


@pytest.fixture(autouse=True)
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in originals.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(text: str, name: str = "recipe.yml") -> str:
    Path(name).write_text(text, "utf-8")
    return name


def linear(*models: str, **more: Any) -> str:
    return recipe(yaml.safe_dump({"merge_method": "linear", "models": [{"model": m} for m in models], **more}))


def run_of(folder: str) -> dict[str, Any]:
    value = json.loads((Path(folder) / "symfuse.json").read_text("utf-8"))
    assert isinstance(value, dict)
    return value


# ---- vocabularies


def test_other_words_at_the_same_ids_are_a_warning_of_check_and_merge(place: Path) -> None:
    found = json.loads(done("check", "a", "other", "--no-sample", "--json").stdout)["recipes"][0]
    assert found["tokenizers"][0]["mixed"] == 50
    (warning,) = found["warnings"]
    assert "50 ids hold different tokens: 3 ('t0' and 'z0')" in warning
    assert "--tokenizer union" in warning
    assert f"warning: {warning}" in done("merge", "a", "other", "-o", "one").stdout
    one, unrelated = run_of("one")["warnings"]
    assert one == warning
    assert "have no relation in this basis" in unrelated
    quiet = done("merge", "a", "other", "-o", "two", "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("", f"symfuse: warning: {warning}\nsymfuse: warning: {unrelated}\n")
    data = done("merge", "a", "other", "-o", "three", "--json")
    assert json.loads(data.stdout)["warnings"] == [warning, unrelated]
    assert warning in data.stderr
    four = run_of(done("merge", "a", "other", "-o", "four", "--tokenizer", "union") and "four")["warnings"]
    assert not any("50 ids" in text for text in four)


def test_tokens_of_one_model_only_are_no_warning(place: Path) -> None:
    a, larger = symfuse.open("a"), symfuse.open("larger")
    (difference,) = compare([a, larger])
    assert difference
    assert not difference.mixed
    assert difference.warning is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["a", "b"], "config, dtypes and tokenizer of a (the first model, as no base_model is given)"),
        (["a", "b", "--base", "2"], "config, dtypes and tokenizer of b (the base model)"),
        (["bare", "b"], "config and dtypes of bare (the first model, as no base_model is given), no tokenizer"),
        (["a", "larger", "--tokenizer", "shared-rows"], ", tokenizer of larger"),
        (["a", "larger", "--tokenizer", "larger"], ", tokenizer of larger"),
        (["a", "other", "--tokenizer", "union"], ", tokenizer of a with 50 tokens added"),
        (["a", "larger", "--tokenizer", "base"], "config, dtypes and tokenizer of a (the first"),
    ],
)
def test_the_tokenizer_that_is_written_is_named(place: Path, args: list[str], words: str) -> None:
    assert words in done("merge", *args, "-o", "out").stdout
    named = re.search("(tokenizer of .*|no tokenizer)", run_of("out")["tokenizer"])
    assert named
    assert named[1] in Path("out/README.md").read_text("utf-8")
    assert (place / "out/tokenizer.json").exists() == (named[1] != "no tokenizer")
    summary = json.loads(done("check", *args, "--no-sample", "--json").stdout)["recipes"][0]["summary"][0]
    assert named[1] in summary or summary.split(" of a (")[0].endswith("tokenizer") or "tokenizer of b (" in summary


def test_the_base_s_tokenizer_without_a_base_is_the_first_model_s(place: Path) -> None:
    """As in mergekit; by a recipe and by options."""
    done("merge", linear("a", "larger", tokenizer_source="base"), "one")
    done("merge", "a", "larger", "-o", "two", "--tokenizer", "base")
    for name in ("one", "two"):
        assert (place / name / "tokenizer.json").read_bytes() == (place / "a/tokenizer.json").read_bytes()
        assert tensors_of(place / name)["lm_head.weight"].shape[0] == 64


# ---- what is recorded runs again


@pytest.mark.parametrize(
    ("models", "options", "text"),
    [
        (["a", "eps"], ["--force-config"], "force_config: true"),
        (["bert0", "pooled"], ["--foreign", "drop"], "foreign: drop"),
        (["bert0", "pooled"], ["--foreign", "keep"], "foreign: keep"),
    ],
)
@pytest.mark.parametrize("form", ["options", "recipe", "flow"])
def test_a_recorded_recipe_has_the_options(
    place: Path, models: list[str], options: list[str], text: str, form: str
) -> None:
    heads = {"heads": "drop"} if "pooled" in models else {}
    if form == "options":
        done("merge", *models, "-o", "one", *options, *(["--task-heads", "drop"] if heads else []))
    else:
        given = linear(*models, **heads)
        if form == "flow":
            recipe(json.dumps(yaml.safe_load(Path(given).read_text("utf-8"))))
        assert run("merge", given, "one").exit_code == 5
        done("merge", given, "one", *options)
    assert text in run_of("one")["recipe"]
    assert text in Path("one/README.md").read_text("utf-8")
    done("merge", recipe(run_of("one")["recipe"], "again.yml"), "two")
    first, second = (place / name / "model.safetensors" for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    assert run("check", "again.yml", "--no-sample").exit_code == 0


def test_an_option_may_contradict_a_recipe(place: Path) -> None:
    done("merge", linear("bert0", "pooled", foreign="refuse", heads="drop"), "out", "--foreign", "drop")
    assert yaml.safe_load(run_of("out")["recipe"])["foreign"] == "drop"


def test_each_recipe_of_a_file_gets_the_options(place: Path) -> None:
    one = {"name": "x", "merge_method": "linear", "models": [{"model": "a"}, {"model": "eps"}]}
    two = {"merge_method": "linear", "models": [{"model": "x"}, {"model": "eps"}]}
    recipe("---\n".join(map(yaml.safe_dump, (one, two))))
    done("merge", "recipe.yml", "out", "--force-config")
    found = list(yaml.safe_load_all(run_of("out")["recipe"]))
    assert [document["force_config"] for document in found] == [True, True]


# ---- check says what a merge would align


@pytest.mark.parametrize(
    ("models", "align", "anchor"),
    [
        (["bert0", "bert1"], {"axes": ["ffn"]}, "bert1"),
        (["bert0", "bert1"], {"axes": ["ffn"], "anchor": 1}, "bert0"),
        (["bert0", "bert1", "bert2"], {"axes": ["ffn"]}, None),
    ],
)
def test_check_says_the_alignment(place: Path, models: list[str], align: dict[str, Any], anchor: str | None) -> None:
    given = linear(*models, align={**align, "layers": "tail:1", "biases": False})
    found = json.loads(done("check", given, "--no-sample", "--json").stdout)["recipes"][0]["alignment"]
    assert found == {
        "anchor": anchor, "axes": ["ffn"], "layers": [1], "scaling": True, "groups": {}, "one_pass": False,
        "biases": False, "data": None, "source": "weights",
    }  # fmt: skip
    text = done("check", given, "--no-sample").stdout
    assert (
        "aligned first: axes ffn of layers 1, biases not translated; anchor: " + (anchor or "the model nearest") in text
    )
    assert f"anchor: {run_of(done('merge', given, 'out') and 'out')['anchor']}" in (
        text if anchor else "anchor: bert0 anchor: bert1 anchor: bert2"
    )
    assert json.loads(done("check", "a", "b", "--json").stdout)["recipes"][0]["alignment"] is None


@pytest.mark.parametrize(("target", "code"), [(".", 8), ("", 2)])
def test_the_working_folder_is_a_target_too(place: Path, target: str, code: int) -> None:
    assert run("check", "a", "b", "--no-sample", "-o", target).exit_code == code
    assert run("check", "a", "b", "--no-sample").exit_code == 0


# ---- messages


SLERP = "merge_method: slerp\nbase_model: a\nmodels:\n- model: a\n- model: b\n"
TIES = "merge_method: ties\nbase_model: a\nmodels:\n- model: b\n"
PLAIN = "merge_method: linear\nmodels:\n"
REFUSED = {
    "config": (PLAIN + "- model: a\n- model: eps\n", ["--force-config", "`force_config: true`"]),
    "foreign": (PLAIN + "- model: bert0\n- model: pooled\nheads: drop\n", ["--foreign drop", "`foreign: drop`"]),
    "a parameter": (SLERP, ["recipe.yml, line 1: merge_method: ", "`parameters: {t: 0.5}`", "--set t=0.5"]),
    "too many": (
        SLERP + "- model: other\nparameters: {t: 0.5}\n",
        ["recipe.yml, line 1: merge_method: slerp takes 1 model beside the base, 2 given"],
    ),
    "range": (
        TIES + "  parameters:\n    density: 1.5\n",
        ["recipe.yml, line 6: models[0].parameters.density: ", "0 to 1"],
    ),
    "sum": (
        PLAIN + "- {model: a, parameters: {weight: 1}}\n- {model: b, parameters: {weight: -1}}\n",
        ["recipe.yml, line 3: ", "recipe.yml, line 4: ", "`normalize: false`", "--no-normalize"],
    ),
    "axes": (PLAIN + "- model: bert0\nalign: {axes: attn}\n", ["recipe.yml, line 4: align.axes", "'attention'"]),
    "layers": (
        PLAIN + "- model: bert0\n- model: bert1\nalign:\n  layers: tail:9\n",
        ["recipe.yml, line 6: align.layers: ", "the model has layers 0 to 1"],
    ),
    "experts": ("gate_mode: hidden\nbase_model: a\nexperts: []\n", ["line 1", "mixture of experts"]),
}


@pytest.mark.parametrize("verb", ["merge", "check"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_place_and_the_way_out(place: Path, case: str, verb: str) -> None:
    text, words = REFUSED[case]
    result = run(verb, recipe(text), "out")
    assert result.exit_code in (2, 5), result.output
    for word in words:
        assert word in result.output
    assert not Path("out").exists()


def test_the_places_are_those_of_the_file_with_several_recipes(place: Path) -> None:
    recipe(f"name: x\n{PLAIN}- model: a\n---\n{SLERP}")
    assert "recipe.yml, line 6: merge_method: slerp needs a value for t" in run("merge", "recipe.yml", "out").output


def test_a_target_that_exists(place: Path) -> None:
    Path("out").mkdir()
    assert "--overwrite" in run("merge", "a", "b", "-o", "out").stderr


def test_options_that_belong_into_a_recipe(place: Path) -> None:
    result = run("merge", linear("a", "b"), "out", "--weights", "1,2", "--align", "all", "--no-biases")
    assert result.exit_code == 2
    assert "--weights, --align, --no-biases: write this in the recipe instead: " in result.stderr
    for words in ("{weight: …}", "`align: {axes: …}`", "`align: {biases: false}`"):
        assert words in result.stderr


def test_one_weight_is_one_weight(place: Path) -> None:
    assert "1 weight for 2 models" in run("merge", "a", "b", "-o", "out", "--weights", "1").stderr
    with pytest.raises(symfuse.SymfuseError, match="1 weight for 2 models"):
        symfuse.merge(["a", "b"], weights=[1.0])


def test_a_name_that_is_too_long_for_a_folder(place: Path) -> None:
    long = "x" * 300
    for models in ([long, "a"], [f"a+{long}", "b"]):
        assert "Traceback" not in (result := run("merge", *models, "-o", "out")).output
        assert result.exit_code in (2, 3), result.output
        assert result.stderr.startswith("symfuse: ")
    with pytest.raises(CheckpointError):
        symfuse.merge_recipe({"merge_method": "linear", "models": [{"model": long}]})


# ---- what is said


def test_all_models_are_named_in_the_order_of_the_recipe(place: Path) -> None:
    parts = [[{"model": "b", "layer_range": [0, 1]}], [{"model": "a", "layer_range": [1, 2]}]]
    given = yaml.safe_dump({"merge_method": "passthrough", "slices": [{"sources": part} for part in parts]})
    assert "\npassthrough(b, a); " in done("merge", recipe(given), "one").stdout
    weighted = done("merge", "other", "b", "a", "-o", "two", "--weights", "3,2,5", "--tokenizer", "a").stdout
    assert "\n0.3·other + 0.2·b + 0.5·a; " in weighted
    task = {"merge_method": "task_arithmetic", "base_model": "a", "models": [{"model": "eps"}, {"model": "b"}]}
    assert (
        "\ntask_arithmetic(eps, b; base a); "
        in done("merge", recipe(yaml.safe_dump(task)), "three", "--force-config").stdout
    )


def test_a_prefix_that_is_added_or_removed_is_said(place: Path) -> None:
    output = done("merge", linear("bert0", "encoder", heads="drop"), "out").stdout
    assert "note: encoder: " in output
    assert "are read under the names of bert0, such as embeddings." in output
    assert "are read under" not in done("merge", "bert0", "bert1", "-o", "two").stdout


def test_inspect_says_what_is_not_matched_and_what_is_not_declared(place: Path) -> None:
    lines = {line.split()[0]: line for line in done("inspect", "bert0").stdout.splitlines() if line.split()}
    assert [lines[axis].rstrip().rpartition("  ")[2].strip() for axis in ("residual", "vocab", "ffn")] == [
        "residual", "never", "ffn",
    ]  # fmt: skip
    found = json.loads(done("inspect", "strange", "--json").stdout)
    model = symfuse.open("strange")
    assert (found["family"], found["axes"], found["tensors"]) == (UNKNOWN, [], len(model))
    assert found["parameters"] == sum(tensor.numel() for tensor in model.values())
    assert "2 layers, vocabulary of 64 tokens" in found["notes"]
    assert "can be merged by names and shapes, but not aligned" in done("inspect", "strange").stdout


def test_a_rank_that_is_not_reached_is_said(place: Path) -> None:
    tuned = {name: tensor.clone() for name, tensor in tensors_of(place / "a").items()}
    for part in ("q_proj", "k_proj", "up_proj"):
        name = next(name for name in tuned if part in name)
        tuned[name] += torch.outer(torch.ones(tuned[name].shape[0]), torch.ones(tuned[name].shape[1]))
    symfuse.open(tuned, config=symfuse.open("a").config).save("tuned")
    output = done("extract-lora", "tuned", "--base", "a", "-o", "one", "--rank", "4").stdout
    assert "3 differences, and so their adapters, have a lower rank than 4" in output
    assert "has 1" in output
    two = json.loads(
        done(
            "extract-lora", "tuned", "--base", "a", "-o", "two", "--rank", "1", "--module", "q_proj,up_proj", "--json"
        ).stdout
    )
    assert two["lower_rank"] == {}
    config = json.loads(Path("two/adapter_config.json").read_text("utf-8"))
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == {"q_proj", "up_proj"}


def _commands() -> Iterator[click.Command]:
    names = ("align", "check", "demo", "extract-lora", "inspect", "merge", "methods", "relate", "verify")
    return (main.commands[name] for name in names)


def test_summaries_are_whole_sentences() -> None:
    for command in _commands():
        assert command.get_short_help_str(60).endswith("."), command.name
        assert "..." not in command.get_short_help_str(60), command.name


def test_only_public_names_are_listed() -> None:
    assert set(dir(symfuse)) == {*symfuse.__all__, "__version__"}


def test_the_example_recipe_is_one() -> None:
    (found,) = read_recipes(EXAMPLES / "recipe.yml")
    assert found.align is not None
    text = (EXAMPLES / "recipe.yml").read_text("utf-8")
    uncommented = re.sub(r"^# (?=\w+: )", "", text, flags=re.MULTILINE)
    assert uncommented != text
    parse_recipe(uncommented)  # what is suggested in comments is right too
