"""What changes nothing is pointed out, with its place; recipes for mergekit that have it run all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from recipes.llama import llama
from symfuse.cli import main
from symfuse.errors import OptionError
from symfuse.methods import METHODS, lookup
from symfuse.recipes import parse_recipe, without_effect
from symfuse.recipes.plan import why_template

NAMES = [f"model.layers.{i}.{part}.weight" for i in range(2) for part in ("self_attn.q_proj", "mlp.up_proj", "norm")]
LINEAR = "merge_method: linear\nmodels:\n- model: a\n- model: b\nparameters:\n  weight:\n"
TASKS = "merge_method: {}\nbase_model: c\nmodels:\n- model: a\n- model: c\n  parameters: {}\nparameters: {}\n"

IDLE = {
    "a filter for no tensor": (
        LINEAR + "  - {filter: self_atn, value: 0.5}\n  - {value: 1}\n",
        ["line 7: parameters.weight[0]: without effect: no tensor of these models has 'self_atn' in its name (did "],
    ),
    "a filter alone": (
        LINEAR.replace("\n  weight:\n", " {weight: {filter: lm_head, value: 0.5}}\n"),
        ["line 5: parameters.weight: without effect: no tensor of these models has 'lm_head' in its name"],
    ),
    "after a value for all": (
        LINEAR + "  - {value: 1}\n  - {filter: mlp, value: 0.5}\n  - {filter: '*', value: 2}\n",
        [
            "line 8: parameters.weight[1]: without effect: the first matching value is used, and r.yml, line 7: pa",
            "line 9: parameters.weight[2]: without effect: the first matching value is used, and r.yml, line 7: pa",
        ],
    ),
    "after filters that cover it": (
        LINEAR + "  - {filter: layers.0, value: 1}\n  - {filter: layers.1, value: 2}\n  - {filter: mlp, value: 3}\n",
        ["line 9: parameters.weight[2]: without effect: values listed before it match all tensors with 'mlp' in"],
    ),
    "a value for the rest, of which there is none": (
        LINEAR + "  - {filter: layers, value: 1}\n  - {value: 2}\n",
        [],
    ),
    "a density without meaning": (
        TASKS.format("task_arithmetic", "{}", "{density: -1, int8_mask: true, rescale: false}"),
        ["line 7: parameters.density: without effect: task_arithmetic accepts density and ignores it; leave it"],
    ),
    "densities of a model": (
        TASKS.format("task_arithmetic", "{}", "{}").replace("model: a\n", "{model: a, parameters: {density: 0.5}}\n"),
        ["line 4: models[0].parameters.density: without effect: task_arithmetic accepts density and ignores it"],
    ),
    "a density that drops nothing": (TASKS.format("task_arithmetic", "{}", "{density: 1}"), []),
    "a density that is used": (TASKS.format("ties", "{}", "{density: 0.5, int8_mask: true}"), []),
    "parameters of the base": (
        TASKS.format("ties", "{weight: 0.3, density: 0.5}", "{}"),
        [
            "line 6: models[1].parameters.weight: without effect: c is the base model, to which ties compares the",
            "line 6: models[1].parameters.density: without effect: c is the base model, to which ties compares the",
        ],
    ),
    "parameters of a base that is a model like the others": (TASKS.format("linear", "{weight: 0.3}", "{}"), []),
    "of a slice and its base": (
        "merge_method: nuslerp\nslices:\n- base_model: c\n  parameters: {weight: {filter: nrom, value: 1}}\n"
        "  sources:\n"
        + "".join(f"  - {{model: {m}, layer_range: [0, 1], parameters: {{weight: 1}}}}\n" for m in "abc"),
        [
            "line 8: slices[0].sources[2].parameters.weight: without effect: c is the base model, to which nuslerp ",
            "line 4: slices[0].parameters.weight: without effect: no tensor of these models has 'nrom' in its name (d",
        ],
    ),
    "of a module": (
        "merge_method: linear\nmodules:\n  text:\n    parameters: {weight: {filter: nrom, value: 1}}\n"
        "    models:\n    - {model: a}\n    - {model: b}\n",
        ["line 4: modules.text.parameters.weight: without effect: no tensor of these models has 'nrom' in its name (d"],
    ),
}


@pytest.mark.parametrize("case", IDLE)
def test_what_has_no_effect_is_named_where_it_stands(case: str) -> None:
    text, beginnings = IDLE[case]
    found = list(without_effect(parse_recipe(text, "r.yml"), NAMES))
    assert [line[: len(f"r.yml, {start}")] for line, start in zip(found, beginnings, strict=True)] == [
        f"r.yml, {start}" for start in beginnings
    ]


def test_what_a_method_ignores_is_a_parameter_of_it() -> None:
    for method in METHODS.values():
        assert set(method.ignored) <= method.parameters.keys()


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("abc"):
        llama(tmp_path / name, seed)
    return tmp_path


def merged(text: str, *options: str, verb: str = "merge") -> str:
    Path("r.yml").write_text(text, "utf-8")
    result = CliRunner().invoke(main, [verb, "r.yml", *(["out"] if verb == "merge" else []), *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("verb", ["merge", "check"])
def test_merge_and_check_say_it(models: Path, verb: str) -> None:
    text = LINEAR + "  - {filter: self_atn, value: 0.5}\n  - {filter: mlp, value: 2}\n  - {value: 1}\n"
    words = "r.yml, line 7: parameters.weight[0]: without effect: no tensor of these models has 'self_atn' in its name"
    assert merged(text, verb=verb).count(words) == 1
    if verb == "merge":
        notes = json.loads((models / "out" / "symfuse.json").read_text("utf-8"))["notes"]
        assert sum(words in note for note in notes) == 1


def test_a_density_that_is_ignored_changes_nothing(models: Path) -> None:
    with_it = merged(TASKS.format("task_arithmetic", "{}", "{density: -1}"))
    assert "parameters.density: without effect: task_arithmetic accepts density" in with_it
    first = load_file(models / "out" / "model.safetensors")
    assert "without effect" not in merged(TASKS.format("task_arithmetic", "{}", "{}"), "--overwrite")
    second = load_file(models / "out" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first | second)


def test_filters_of_layers_that_are_stacked_deeper_than_in_any_model(models: Path) -> None:
    """A parameter of the whole merge is for a layer at its new depth."""
    stack = "".join(
        f"- sources: [{{model: {m}, layer_range: [0, 2]}}, {{model: c, layer_range: [0, 2]}}]\n" for m in "ab"
    )
    cases = "- {filter: layers.3., value: 0}\n  - {filter: layers.4., value: 0}\n  - {value: 1}\n"
    said = merged(f"merge_method: slerp\nbase_model: c\nslices:\n{stack}parameters:\n  t:\n  {cases}")
    assert said.count("without effect") == 1
    assert "parameters.t[1]: without effect: no tensor of these models has 'layers.4.' in its name" in said
    out, base = load_file(models / "out" / "model.safetensors"), load_file(models / "c" / "model.safetensors")
    query = "model.layers.{}.self_attn.q_proj.weight".format
    assert torch.equal(out[query(3)], base[query(1)])
    assert not torch.equal(out[query(1)], base[query(1)])


NUMBERS = [(m.name, p.name) for m in METHODS.values() for p in m.parameters.values() if p.kind in (int, float)]


@pytest.mark.parametrize(("name", "parameter"), NUMBERS)
@pytest.mark.parametrize("value", [1e300, -1e39, 10**400, float("nan")], ids=["1e300", "-1e39", "long", "nan"])
def test_no_method_sees_a_number_beyond_float32(name: str, parameter: str, value: Any) -> None:
    with pytest.raises(
        OptionError, match=rf"^here: {parameter} is .{{1,24}}, expected a .* number between -3\.4e\+38 "
    ):
        lookup(name).parameters[parameter].value(value, "here")


def test_the_largest_number_of_float32_is_taken() -> None:
    weight = lookup("linear").parameters["weight"]
    assert weight.value(torch.finfo(torch.float32).max, "here") == torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", "the first model, as no base_model is given"),
        ("base_model: b\n", "the base model"),
        ("heads: b\n", "whose head is kept"),
        ("base_model: b\nheads: b\n", "the base model"),
    ],
)
def test_why_a_model_gives_the_config(more: str, words: str) -> None:
    models = "merge_method: linear\nmodels:\n- {model: a}\n- {model: b}\n"
    assert why_template(parse_recipe(models + more)) == words


def test_heads_of_no_model_are_refused_with_their_line(models: Path) -> None:
    Path("r.yml").write_text("merge_method: linear\nmodels:\n- {model: a}\n- {model: b}\nheads: 3\n", "utf-8")
    result = CliRunner().invoke(main, ["merge", "r.yml", "out"])
    assert result.exit_code == 2
    assert "r.yml, line 5: heads: heads '3': write average, drop, or the number or name of one model" in result.output
    assert not (models / "out").exists()
