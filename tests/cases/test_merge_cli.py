"""The verb merge from end to end: what it says, what it writes beside the weights, and options as recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner, Result

from contract.tiny import MODELS
from recipes.llama import COMMON, EMBED, adapter, llama, tensors_of, unknown
from symfuse import __version__
from symfuse.cli import main
from symfuse.methods import METHODS


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli")
    for seed, name in enumerate("abc"):
        llama(root / name, seed)
    llama(root / "larger", 3, rows=66, pieces=[*COMMON, *(f"u{i}" for i in range(11))], added=["<x>", "<y>"])
    adapter(root / "lora", 5)
    for seed in (6, 7):
        unknown(root / f"strange{seed}", seed)
    for seed in range(2):
        MODELS["bert-mlm"](seed).save(root / f"bert{seed}")
    return root


@pytest.fixture(autouse=True)
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in originals.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["merge", *args])


def done(*args: str) -> Result:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result


def write(recipe: dict[str, Any]) -> str:
    Path("recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    return "recipe.yml"


def card(folder: str) -> tuple[dict[str, Any], str]:
    start, block, text = (Path(folder) / "README.md").read_text("utf-8").split("---\n", 2)
    assert start == ""
    metadata = yaml.safe_load(block)
    assert isinstance(metadata, dict)
    return metadata, text


def run_of(folder: str) -> dict[str, Any]:
    value = json.loads((Path(folder) / "symfuse.json").read_text("utf-8"))
    assert isinstance(value, dict)
    return value


TIES = {
    "merge_method": "ties",
    "base_model": "a",
    "models": [{"model": "b", "parameters": {"weight": 0.5}}, {"model": "c", "parameters": {"weight": 0.25}}],
    "parameters": {"density": 0.5, "normalize": False},
}


STRANGE = {"base_model": "strange6", "models": [{"model": "strange7"}]}


def test_the_card_of_a_recipe(place: Path) -> None:
    done(write(TIES), "out")
    metadata, text = card("out")
    assert "base_model" not in metadata  # the hub takes the ids of its own models, and refuses paths
    assert metadata["library_name"] == "transformers"
    assert isinstance(metadata["tags"], list)
    assert {"merge", "symfuse"} <= set(metadata["tags"])
    assert Path("recipe.yml").read_text("utf-8").strip() in text
    for name in "abc":
        assert f"`{name}`" in text
    assert "ties" in text
    assert "weight 1" not in text, "weights that nobody gave"


def test_the_run_as_data(place: Path) -> None:
    done(write(TIES), "out")
    data = run_of("out")
    assert data["symfuse"] == __version__
    assert (data["method"], data["base"], data["seed"], data["anchor"]) == ("ties", "a", 0, None)
    assert sorted(data["models"]) == ["a", "b", "c"]
    assert yaml.safe_load(data["recipe"]) == TIES
    assert len(data["inputs"]) == 3
    assert {entry["name"] for entry in data["inputs"]} == {"a", "b", "c"}


def test_the_card_tells_of_an_adapter(place: Path) -> None:
    done(
        write({"merge_method": "linear", "models": [{"model": "a+lora"}, {"model": "b"}], "parameters": {"weight": 1}}),
        "out",
    )
    _, text = card("out")
    assert "- `a+lora`" in text
    assert "- `b`" in text


def test_options_are_a_recipe(place: Path) -> None:
    recipe = write(TIES)
    done(recipe, "one")
    done(
        "a",
        "b",
        "c",
        "-o",
        "two",
        "--method",
        "ties",
        "--base",
        "1",
        "--weights",
        "0.5,0.25",
        "--no-normalize",
        "--set",
        "density=0.5",
    )
    assert (place / "one/model.safetensors").read_bytes() == (place / "two/model.safetensors").read_bytes()
    Path("again.yml").write_text(run_of("two")["recipe"], "utf-8")  # which is written down, and runs
    done("again.yml", "three")
    assert (place / "three/model.safetensors").read_bytes() == (place / "two/model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["karcher", "nearswap", "nuslerp", "sce", "soup", "tsv"])
def test_methods_of_all_kinds_run_from_the_command_line(place: Path, name: str) -> None:
    method = METHODS[name]
    count = (2 if method.models[1] != 1 else 1) + (method.base == "required")
    needed = [f"--set={p.name}=0.5" for p in method.parameters.values() if p.default is None]
    base = ["--base", "1"] if method.base == "required" else []
    done(*["a", "b", "c"][:count], "-o", "out", "--method", name, *needed, *base, "-q")
    _, report = transformers.AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(report.values()), report
    assert run_of("out")["method"] == name


def test_json_is_one_document(place: Path) -> None:
    value = json.loads(done(write(TIES), "out", "--json").stdout)
    assert value["output"] == "out"
    assert {key: value[key] for key in ("method", "recipe", "base")} == {
        key: run_of("out")[key] for key in ("method", "recipe", "base")
    }


def test_what_decides_the_config_is_said(place: Path) -> None:
    """The base, or the first model, which is said to be by chance."""
    output = done("a", "b", "-o", "one").output
    assert "config, dtypes and tokenizer of a" in output
    assert "the first" in output
    assert "the first" not in done(write(TIES), "two").output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"merge_metod": "ties"}, ["merge_metod", "merge_method"]),
        ({"parameters": {"densty": 0.5}}, ["densty", "density"]),
        ({"merge_method": "tise"}, ["tise", "ties"]),
        ({"models": [{"model": "b", "parametrs": {}}]}, ["parametrs", "parameters"]),
        ({"dtype": "bf16"}, ["dtype", "bfloat16"]),
        ({"models": [{"model": "nobody"}]}, ["nobody"]),
        ({"models": [{"model": "bert0"}]}, ["bert0"]),
        ({"models": [{"model": "larger"}]}, ["64", "66", "union"]),
        (STRANGE | {"align": {"axes": "all"}}, ["align", "names and shapes"]),
    ],
)
def test_what_is_wrong_is_refused_at_once_with_the_way_out(
    place: Path, change: dict[str, Any], words: list[str]
) -> None:
    before = [*sorted(place.iterdir()), place / "recipe.yml"]
    result = run(write(TIES | change), "out")
    assert result.exit_code in (2, 3, 4, 5), result.output
    for word in words:
        assert word in result.output
    assert sorted(place.iterdir()) == sorted(before)


def test_c05_rows_of_the_larger_vocabulary(place: Path) -> None:
    done("a", "larger", "-o", "out", "--tokenizer", "shared-rows")
    a, b, found = (tensors_of(place / name) for name in ("a", "larger", "out"))
    for name in (EMBED, "lm_head.weight"):
        torch.testing.assert_close(found[name][:64], (a[name] + b[name][:64]) / 2, rtol=2**-24, atol=1e-9)
        assert torch.equal(found[name][64:], b[name][64:])
    assert json.loads((place / "out/config.json").read_text("utf-8"))["vocab_size"] == 66
    assert (place / "out/tokenizer.json").read_bytes() == (place / "larger/tokenizer.json").read_bytes()
    _, report = transformers.AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(report.values()), report


def test_c78_one_model_is_copied(place: Path) -> None:
    for method in ("linear", "passthrough"):
        done("a", "-o", method, "--method", method)
        assert (place / method / "model.safetensors").read_bytes() == (place / "a/model.safetensors").read_bytes()


def test_an_aligned_merge_keeps_its_alignment_and_its_proof(place: Path) -> None:
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": "bert0",
        "models": [{"model": "bert1"}],
        "align": {"axes": "ffn"},
    }
    output = done(write(recipe), "out").output
    assert "anchor: bert0" in output
    data = run_of("out")
    assert data["anchor"] == "bert0"  # task vectors start from it
    assert [one["verified"]["equal"] for one in data["alignments"]] == [True]
    assert len(list(Path("out").glob("alignment-*.symfuse"))) == 1
    assert "no output is proved" in card("out")[1]


def test_two_documents_of_which_one_is_used_by_the_other(place: Path) -> None:
    first = {
        "name": "mean",
        "merge_method": "linear",
        "models": [{"model": "a"}, {"model": "b"}],
        "parameters": {"weight": 1},
    }
    last = {
        "merge_method": "task_arithmetic",
        "base_model": "a",
        "models": [{"model": "mean"}],
        "parameters": {"weight": 2},
    }
    Path("two.yml").write_text("---\n".join(map(yaml.safe_dump, (last, first))), "utf-8")
    done("two.yml", "out")
    a, b, found = (tensors_of(place / name) for name in ("a", "b", "out"))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, b[name], rtol=2**-22, atol=1e-6)
        assert not torch.equal(tensor, a[name])
    assert not (place / "mean").exists()
    _, text = card("out")  # of the folders that it was made from
    for name in ("a", "b"):
        assert f"`{name}`" in text
    assert "name: mean" in text, "the recipe of what it was made from"
