"""What is wrong with a recipe is said with file, line and path, and the way out."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symfuse.errors import OptionError
from symfuse.recipes import parse_recipe, read_recipes

EXAMPLES = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.yml"))]
MODELS = "merge_method: linear\nmodels:\n  - model: a\n  - model: b\n"
SLICE = "merge_method: linear\nslices:\n  - sources:\n"

BAD = {
    # keys
    "key at the top": (MODELS + "out_dtpye: float16\n", "line 5: out_dtpye: unknown key (did you mean 'out_dtype'?)"),
    "key of a model": (MODELS + "    paramters: {}\n", "line 5: models[1].paramters: unknown key (did you mean 'param"),
    "key of a slice": (
        SLICE + "      - {model: a, layer_range: [0, 1]}\n    base_modle: a\n",
        "line 5: slices[0].base_modle: unknown key (did you mean 'base_model'?)",
    ),
    "key of a source": (
        SLICE + "      - model: a\n        layerrange: [0, 1]\n",
        "line 5: slices[0].sources[0].layerrange: unknown key (did you mean 'layer_range'?); known here: model, l",
    ),
    "key of a module": (
        "merge_method: linear\nmodules:\n  text:\n    model: []\n",
        "line 4: modules.text.model: unknown key (did you mean 'models'?)",
    ),
    "key of a filter": (
        MODELS + "parameters:\n  weight:\n  - fliter: mlp\n    value: 1\n",
        "line 7: parameters.weight[0].fliter: unknown key (did you mean 'filter'?)",
    ),
    "key of a tokenizer": (
        MODELS + "tokenizer:\n  sources: union\n",
        "line 6: tokenizer.sources: unknown key (did you mean 'source'?)",
    ),
    "key of a token": (
        MODELS + "tokenizer:\n  tokens:\n    <s>: {fource: true}\n",
        "line 7: tokenizer.tokens.<s>.fource: unknown key",
    ),
    "key of a token's zeros": (
        MODELS + "tokenizer:\n  tokens:\n    <s>:\n      source: {kind: zero, model: a}\n",
        "line 8: tokenizer.tokens.<s>.source.model: unknown key",
    ),
    "key of align": (MODELS + "align:\n  ancor: a\n", "line 6: align.ancor: unknown key (did you mean 'anchor'?)"),
    "key of a reference": (
        "merge_method: linear\nmodels:\n- model: {model: a, adapter: b}\n",
        "line 3: models[0].model.adapter: unknown key; known here: model, lora",
    ),
    "key twice": (
        MODELS + "dtype: float16\nmodels: []\n",
        "line 6: duplicate key 'models' (first in line 2)",
    ),
    "key twice further in": (
        MODELS + "parameters:\n  weight: 1\n  weight: 2\n",
        "line 7: parameters: duplicate key 'weight' (first in line 6)",
    ),
    "key that is a list": (MODELS + "? [a, b]\n: 1\n", "line 5: a key must be a plain word"),
    "residual weight": (
        SLICE + "      - {model: a, layer_range: [0, 1]}\n    residual_weight: 0.5\n",
        "line 5: slices[0].residual_weight: mergekit ignores this key; remove it",
    ),
    "layers of a whole model": (
        MODELS + "    layer_range: [0, 1]\n",
        "line 5: models[1].layer_range: layers are chosen in `slices`",
    ),
    "overridden architecture": (
        "merge_method: linear\nmodels:\n- model:\n    model: a\n    override_architecture: X\n",
        "line 5: models[0].model.override_architecture: the architecture is that of",
    ),
    # parameters
    "parameter": (
        MODELS + "    parameters:\n      wieght: 1\n",
        "line 6: models[1].parameters.wieght: unknown parameter of linear (did you mean 'weight'?); it has weight, ",
    ),
    "parameter of another type": (
        MODELS + "parameters:\n  weight: much\n",
        "line 6: parameters.weight: weight is 'much', expected a finite number",
    ),
    "parameter in a gradient": (
        MODELS + "parameters:\n  weight:\n  - 1\n  - true\n",
        "line 8: parameters.weight[1]: weight is True, expected a finite number",
    ),
    "parameter in a filter": (
        MODELS + "parameters:\n  normalize:\n  - filter: mlp\n    value: 1\n",
        "line 8: parameters.normalize[0].value: normalize is 1, expected true or false",
    ),
    "parameter that is empty": (MODELS + "parameters:\n  weight:\n", "line 6: parameters.weight: expected a single"),
    "gradient that is empty": (MODELS + "parameters: {weight: []}\n", "line 5: parameters.weight: the list is empty"),
    "gradient with filters": (
        MODELS + "parameters:\n  weight: [1, {value: 2}]\n",
        "line 6: parameters.weight[0]: expected a mapping (key: value), found 1",
    ),
    "filter without value": (
        MODELS + "parameters:\n  weight:\n  - filter: mlp\n",
        "line 7: parameters.weight[0]: `value` is missing",
    ),
    "parameter not a number": (MODELS + "parameters: {weight: .nan}\n", "weight is nan, expected a finite number"),
    "parameter without bound": (
        MODELS + "parameters: {weight: 1e999}\n",
        "weight is '1e999', expected a finite number",
    ),
    "parameter of 400 digits": (MODELS + f"parameters: {{weight: {'9' * 400}}}\n", "9, expected a finite number"),
    "parameter beyond float32": (
        MODELS + "parameters:\n  weight: [1, 1.0e+300]\n",
        "line 6: parameters.weight[1]: weight is 1e+300, expected a finite number between -3.4e+38 and 3.4e+38",
    ),
    "parameter that is a text beyond float32": (
        MODELS + "parameters: {weight: -1e39}\n",
        "weight is '-1e39', expected",
    ),
    "whole number beyond float32": (
        MODELS.replace("linear", "karcher") + "parameters: {max_iter: 1.0e+300}\n",
        "line 5: parameters.max_iter: max_iter is 1e+300, expected a whole number between -3.4e+38 and 3.4e+38",
    ),
    "parameter of 5000 digits": (MODELS + f"parameters: {{weight: {'9' * 5000}}}\n", "9' does not read as int"),
    "parameter of the whole merge": (
        MODELS + "    parameters: {normalize: true}\n",
        "line 5: models[1].parameters.normalize: normalize of linear is for the whole merge, not for one model",
    ),
    "parameters as a list": (
        MODELS + "parameters:\n- weight: 1\n",
        "line 5: parameters: expected a mapping (key: value), found a list",
    ),
    # methods and models
    "method": (
        MODELS.replace("linear", "liner"),
        "line 1: merge_method: merge method 'liner' is not known (did you mea",
    ),
    "no method": ("models: [{model: a}]\n", "line 1: `merge_method` is missing"),
    "no models": ("merge_method: linear\n", "line 1: expected one of models, slices, modules, found none of them"),
    "models and slices": (
        MODELS + "slices: []\n",
        "line 5: slices: expected one of models, slices, modules, found models and slices",
    ),
    "a module with neither": (
        "merge_method: linear\nmodules:\n  text: {parameters: {}}\n",
        "line 3: modules.text: expected one of models, slices, found none of them",
    ),
    "no module": ("merge_method: linear\nmodules: {}\n", "line 2: modules: no module is named"),
    "no model": ("merge_method: linear\nmodels:\n- parameters: {}\n", "line 3: models[0]: `model` is missing"),
    "empty models": ("merge_method: linear\nmodels: []\n", "line 2: models: the list is empty"),
    "models as a mapping": ("merge_method: linear\nmodels:\n  a: 1\n", "line 2: models: expected a list, found a map"),
    "models as words": (
        "merge_method: linear\nmodels: [a]\n",
        "line 2: models[0]: expected a mapping (key: value), fo",
    ),
    "model as a number": (
        "merge_method: linear\nmodels: [{model: 7}]\n",
        "line 2: models[0].model: expected a text, found 7; write it in quotes",
    ),
    "two adapters": (MODELS + "base_model: a+b+c\n", "line 5: base_model: 'a+b+c' has more than one +"),
    "two revisions": (MODELS + "base_model: a@b@c\n", "line 5: base_model: 'a@b@c' does not name a model"),
    "adapter of nothing": (MODELS + "base_model: +b\n", "line 5: base_model: '+b' does not name a model"),
    "reference by path": (MODELS + "base_model: {path: a}\n", "line 5: base_model.path: unknown key"),
    # layers
    "layers backwards": (
        SLICE + "      - {model: a, layer_range: [4, 2]}\n",
        "line 4: slices[0].sources[0].layer_range: [4, 2]: expected [first layer, layer after the last]",
    ),
    "layers below zero": (SLICE + "      - {model: a, layer_range: [-1, 2]}\n", "layer_range[0]: -1 is below 0"),
    "three layers": (SLICE + "      - {model: a, layer_range: [0, 1, 2]}\n", "layer_range: [0, 1, 2]: expected"),
    "half a layer": (SLICE + "      - {model: a, layer_range: [0, 1.5]}\n", "layer_range[1]: expected a whole number"),
    "no layers": (SLICE + "      - {model: a}\n", "line 4: slices[0].sources[0]: `layer_range` is missing"),
    "layers of other number": (
        SLICE + "      - {model: a, layer_range: [0, 4]}\n      - {model: b, layer_range: [2, 4]}\n",
        "line 5: slices[0].sources[1].layer_range: 2 layers, but the first source of the slice has 4",
    ),
    "no sources": ("merge_method: linear\nslices:\n- parameters: {}\n", "line 3: slices[0]: `sources` is missing"),
    # the rest
    "dtype": (MODELS + "dtype: bfloat61\n", "line 5: dtype: 'bfloat61' is not known (did you mean 'bfloat16'?)"),
    "integer dtype": (MODELS + "out_dtype: int64\n", "line 5: out_dtype: 'int64' is not known"),
    "two tokenizers": (
        MODELS + "tokenizer_source: union\ntokenizer: {source: union}\n",
        "line 5: tokenizer_source: both tokenizer and tokenizer_source",
    ),
    "tokenizer as a word": (MODELS + "tokenizer: union\n", "line 5: tokenizer: expected a mapping, such as"),
    "token of no kind": (
        MODELS + "tokenizer:\n  tokens:\n    <s>:\n      source: {model: a, token: b}\n",
        "line 8: tokenizer.tokens.<s>.source: `kind` is missing",
    ),
    "token by name and number": (
        MODELS
        + "tokenizer:\n  tokens:\n    <s>:\n      source: {kind: model_token, model: a, token: b, token_id: 1}\n",
        "expected one of token, token_id, found token and token_id",
    ),
    "token of another kind": (
        MODELS + "tokenizer: {tokens: {s: {source: {kind: zeros}}}}\n",
        "'zeros' is not known (did you mean 'zero'?); choose from model_token, zero",
    ),
    "padding": (MODELS + "tokenizer: {pad_to_multiple_of: 0}\n", "tokenizer.pad_to_multiple_of: 0 is below 1"),
    "empty template": (MODELS + "chat_template: ''\n", "line 5: chat_template: the text is empty"),
    "empty align": (MODELS + "align:\n", "line 5: align: the block is empty; write `align: {}`"),
    "source of align": (MODELS + "align: {source: gradients}\n", "'gradients' is not known; choose from weights, act"),
    "number of the anchor": (MODELS + "align: {anchor: 3}\n", "align.anchor: model 3: there are models 1 to 2"),
    "anchor of slices by number": (
        SLICE + "      - {model: a, layer_range: [0, 1]}\nalign: {anchor: 1}\n",
        "line 5: align.anchor: models are numbered under `models` only",
    ),
    "axes in one text of a list": (
        MODELS + "align:\n  axes: [v, 'attention,ffn']\n",
        "line 6: align.axes[1]: axis 'attention,ffn' is not known (did you mean 'attention'?)",
    ),
    "switch of align": (MODELS + "align: {biases: 1}\n", "line 5: align.biases: expected true or false, found 1"),
    "seed": (MODELS + "seed: -1\n", "line 5: seed: -1 is below 0"),
    "name": (MODELS + "name: ../x\n", "line 5: name: '../x' cannot be a name"),
    "axes of align": (
        MODELS + "align:\n  axes: [ffn, attn]\n",
        "line 6: align.axes[1]: axis 'attn' is not known (did you mean 'attention'?); choose from ",
    ),
    "axes that nothing moves": (
        MODELS + "align: {axes: 'ffn,positions'}\n",
        "line 5: align.axes: axis 'positions' is not known",
    ),
    "foreign tensors": (MODELS + "foreign: keeps\n", "line 5: foreign: 'keeps' is not known (did you mean 'keep'?)"),
    "missing biases": (
        MODELS + "missing_bias: drop\n",
        "line 5: missing_bias: 'drop' is not known; choose from refuse",
    ),
    "forced config": (MODELS + "force_config: 1\n", "line 5: force_config: expected true or false, found 1"),
    "mixture of experts": (
        "base_model: a\ngate_mode: hidden\nexperts: [{source_model: b}]\n",
        "line 2: gate_mode: this recipe is for a mixture of experts, which mergekit-moe builds",
    ),
    # YAML
    "nothing": ("# only a comment\n", "the recipe is empty"),
    "a list": ("- a\n", "line 1: a recipe is a mapping"),
    "a word": ("linear\n", "line 1: a recipe is a mapping"),
    "a tab": (MODELS + "parameters:\n\tweight: 1\n", "line 6, column 1: invalid YAML: a tab; YAML is indented with"),
    "a bracket": (MODELS + "dtype: [\n", "line 6, column 1: invalid YAML"),
    "a colon": (MODELS + "dtype: a: b\n", "line 5, column 9: invalid YAML: mapping values are not allowed here"),
    "no anchor of that name": (MODELS + "dtype: *x\n", "line 5, column 8: invalid YAML: found undefined alias"),
    "a character": (MODELS + "dtype: \x00\n", "line 5: the character '\\x00' is not allowed"),
    "a Python tag": (
        MODELS + "dtype: !!python/object/apply:os.getcwd []\n",
        "line 5: dtype: the tag !!python/object/apply:os.getcwd is not allowed",
    ),
    "a tag": (MODELS + "dtype: !!binary aGk=\n", "line 5: dtype: the tag !!binary is not allowed"),
    "a false bool": (MODELS + "dtype: !!bool perhaps\n", "line 5: dtype: 'perhaps' does not read as bool"),
    "a merged list": (MODELS + "<<: [1]\n", "line 5: `<<` merges mappings only"),
    "two documents": (MODELS + "---\n" + MODELS, "the recipe holds 2 documents, expected one"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_recipe_is_refused_where_it_is_wrong(case: str) -> None:
    text, message = BAD[case]
    with pytest.raises(OptionError, match=re.escape(message)) as raised:
        parse_recipe(text, "r.yml")
    assert str(raised.value).startswith("r.yml")
    assert len(str(raised.value).splitlines()) == 1


def bomb(levels: int, alias: str) -> str:
    lines = ["a0: &a0 {k: 1}"] + [
        f"a{i}: &a{i} {alias.format(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, levels)
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(12, "[{}]"), "values, with aliases expanded, are too many"),
        (bomb(12, "{{<<: [{}]}}"), "values, with aliases expanded, are too many"),
        ("a: &a [*a]", "nested too deeply"),
        ("a: &a {<<: *a}", "nested too deeply"),
        ("[" * 2_000, "nested too deeply"),
        ("a: " + "[" * 60 + "]" * 60, "nested too deeply"),
        ("#" * 1_000_001, "1,000,001 characters are too many"),
    ],
)
def test_bombs_are_defused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_recipe(text)


def test_a_mapping_is_checked_like_a_text_but_has_no_lines() -> None:
    with pytest.raises(OptionError, match=r"^recipe: models\[0\]\.modle: unknown key \(did you mean 'model'\?\)"):
        parse_recipe({"merge_method": "linear", "models": [{"modle": "a"}]})
    with pytest.raises(OptionError, match="only texts, numbers, lists and mappings make a recipe"):
        parse_recipe({"merge_method": object()})


@given(st.data())
def test_a_damaged_recipe_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(EXAMPLES))
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(start + 8, len(text))))
    put = data.draw(
        st.sampled_from(["", " ", "\n", "[", "{", "*", "&", "!", "- ", ": ", "~", "1", ".inf", "---\n", '"'])
    )
    with contextlib.suppress(OptionError):
        recipe = parse_recipe(text[:start] + put + text[stop:])
        assert recipe.models or recipe.slices or recipe.modules


SEVERAL = {
    "the same name": (["name: x", "name: x"], "line 5: name: a second recipe of the name 'x'"),
    "no name twice": (["seed: 1", "seed: 2"], "line 5: a second recipe without `name`; all but the last one need"),
    "itself": (["name: x\nbase_model: x"], "recipes depend on each other: x → x"),
    "a circle": (
        ["name: x\nbase_model: y", "name: y\nalign: {anchor: z}", "name: z\ntokenizer_source: x", "name: w"],
        "recipes depend on each other: x → y → z → x",
    ),
    "no such name": (
        ["name: first-merge", "base_model: frist-merge"],
        "the recipe without a name needs 'frist-merge', which is no recipe of this file and no folder (did you mean",
    ),
    "a list among recipes": (["name: x", "name: [y]"], "line 5: name: expected a text, found a list"),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_recipes_of_one_file_fit_together(case: str, tmp_path: Path) -> None:
    heads, message = SEVERAL[case]
    file = tmp_path / "r.yml"
    file.write_text("---\n".join(f"{head}\nmerge_method: linear\nmodels: [{{model: a}}]\n" for head in heads), "utf-8")
    with pytest.raises(OptionError, match=re.escape(message)) as raised:
        read_recipes(file)
    assert str(raised.value).startswith(str(file))


def test_a_folder_may_be_called_nearly_like_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "merge-b").mkdir()
    file = tmp_path / "r.yml"
    models = "merge_method: linear\nmodels: [{model: merge-b}]\n"
    file.write_text(f"name: merge-a\n{models}---\n{models}", "utf-8")
    assert [recipe.name for recipe in read_recipes(file)] == ["merge-a", None]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"none\.yml: the recipe cannot be read \(No such file or directory\)"):
        read_recipes(tmp_path / "none.yml")
    with pytest.raises(OptionError, match="the recipe cannot be read"):
        read_recipes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\xff\xfe")
    with pytest.raises(OptionError, match=r"model\.safetensors: not UTF-8 text \(byte 1\); is it a recipe\?"):
        read_recipes(tmp_path / "model.safetensors")
    (tmp_path / "empty.yml").write_text("---\n---\n", "utf-8")
    with pytest.raises(OptionError, match=r"empty\.yml: the recipe is empty"):
        read_recipes(tmp_path / "empty.yml")
