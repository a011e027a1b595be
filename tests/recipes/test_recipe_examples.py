"""The kinds of recipes that mergekit's documentation shows, with names of our own, and what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from symfuse.methods import METHODS
from symfuse.recipes import (
    Align,
    Case,
    ModelRef,
    Setting,
    Tokenizer,
    parse_recipe,
    read_recipes,
    settings_for,
)
from symfuse.rewriting.vocabulary import TokenSource

FOLDER = Path(__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("*.yml"))


def methods(file: str) -> set[str]:
    return {document["merge_method"] for document in yaml.safe_load_all((FOLDER / file).read_text("utf-8"))}


def one(file: str):
    (recipe,) = read_recipes(FOLDER / file)
    return recipe


def test_every_example_names_a_method_that_exists() -> None:
    missing = {file: unknown for file in FILES if (unknown := methods(file) - METHODS.keys())}
    assert not missing, missing


@pytest.mark.parametrize("file", [file for file in FILES if methods(file) <= METHODS.keys()])
def test_every_example_parses_and_its_text_says_the_same_again(file: str) -> None:
    recipes = read_recipes(FOLDER / file)
    assert {recipe.merge_method for recipe in recipes} == methods(file)
    for recipe in recipes:
        assert parse_recipe(recipe.text) == recipe
        again = parse_recipe(yaml.safe_load(recipe.text))
        assert parse_recipe(again.text) == again
        assert replace(again, text="") == replace(recipe, text="")


def test_a_single_recipe_keeps_its_text() -> None:
    assert one("linear.yml").text == (FOLDER / "linear.yml").read_text("utf-8")
    assert one("linear.yml").text.startswith("# Three")


def test_linear() -> None:
    recipe = one("linear.yml")
    assert [str(given.model) for given in recipe.models] == ["tiny/a", "tiny/b", "tiny/c"]
    assert [given.parameters["weight"].at("x", 0) for given in recipe.models] == [1.0, 0.3, 0.5]
    assert recipe.dtype == "float16"
    assert recipe.models_used() == (ModelRef("tiny/a"), ModelRef("tiny/b"), ModelRef("tiny/c"))
    assert (recipe.name, recipe.base_model, recipe.tokenizer, recipe.align) == (None, None, None, None)
    assert (recipe.seed, recipe.heads) == (0, "average")


def test_references() -> None:
    recipe = one("references.yml")
    base = ModelRef("tiny/base", "v1.0")
    assert recipe.base_model == base
    first, second, third, fourth = (given.model for given in recipe.models)
    assert first == base
    assert second == ModelRef("tiny/a", None, ModelRef("tiny/adapter", "2024-01-01"))
    assert str(second) == "tiny/a+tiny/adapter@2024-01-01"
    assert third == ModelRef("c++/tiny", "main")
    assert fourth == ModelRef("C++/model@home", None, ModelRef("tiny/adapter", "main"))
    assert recipe.parameters["weight"].at("x", 0) == 0.1
    assert recipe.models_used() == (base, second, third, fourth)


def test_modules_and_the_order_of_their_settings() -> None:
    recipe = one("modules.yml")
    encoder, decoder = recipe.modules["encoder"], recipe.modules["decoder"]
    assert [str(given.model) for given in encoder.models] == ["tiny/a", "tiny/b"]
    (part,) = decoder.slices
    assert part.base_model == ModelRef("tiny/b")
    assert [source.layer_range for source in part.sources] == [(0, 2), (2, 4)]
    chain = settings_for(recipe, decoder, part, part.sources[1])
    assert chain == (part.sources[1].parameters, part.parameters, decoder.parameters, recipe.parameters)
    assert chain[0]["weight"].at("x", 0) == 0.1
    assert chain[1]["normalize"].at("x", 0) is False
    assert settings_for(recipe) == ({},)
    assert [str(model) for model in recipe.models_used()] == ["tiny/a", "tiny/b", "tiny/c"]


def test_tokenizers() -> None:
    chat = ModelRef("tiny/chat")
    assert one("tokenizer_source.yml").tokenizer == Tokenizer("union")
    assert one("chat_template.yml").tokenizer == Tokenizer("base")
    tokenizer = one("tokenizer_tokens.yml").tokenizer
    assert tokenizer == Tokenizer(
        chat,
        {
            "<|im_start|>": TokenSource("model", "tiny/chat"),
            "<|tool|>": TokenSource("model", "tiny/a", force=True),
            "<|think|>": TokenSource("model_token", "tiny/chat", token="<|im_start|>"),
            "<|answer|>": TokenSource("model_token", "tiny/chat", token_id=12),
            "<|spare|>": TokenSource("zero"),
        },
        (chat, ModelRef("tiny/a"), chat, chat),
    )
    assert tokenizer.models_used() == (chat, ModelRef("tiny/a"))
    two = one("tokenizer_two_formats.yml").tokenizer
    assert two is not None
    assert two.pad_to_multiple_of == 64
    assert [name for name, token in two.tokens.items() if token.force] == [
        *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ]


def test_chat_template_and_dtypes() -> None:
    recipe = one("chat_template.yml")
    assert (recipe.chat_template, recipe.dtype, recipe.out_dtype) == ("auto", "bfloat16", "float16")


def test_align() -> None:
    recipe = one("align.yml")
    assert recipe.align == Align(axes=("attention", "ffn"), anchor=recipe.models[1].model, layers="0-4", scaling=False)
    assert (recipe.seed, recipe.heads) == (7, "drop")
    text = "merge_method: linear\nmodels: [{model: a}]\nalign: {anchor: b, layers: 3, axes: all}"
    named = parse_recipe(text)
    assert named.align == Align(axes="all", anchor=ModelRef("b"), layers="3")
    assert named.models_used() == (ModelRef("a"), ModelRef("b"))


def test_several_recipes_come_after_what_they_need() -> None:
    recipes = read_recipes(FOLDER / "several_named.yml")
    assert [recipe.name for recipe in recipes] == ["first", "second", "third"]
    assert recipes[2].text.startswith("name: third")
    assert recipes[1].text.startswith("name: second")
    assert "---" not in "".join(recipe.text for recipe in recipes)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_recipe_without_a_name_comes_last(order: tuple[int, ...], tmp_path: Path) -> None:
    models = "merge_method: linear\nmodels: [{{model: {}}}]\n"
    parts = ["name: one\n" + models.format("a"), "name: two\n" + models.format("one"), models.format("b")]
    file = tmp_path / "r.yml"
    file.write_text("---\n".join(parts[i] for i in order), "utf-8")
    assert [recipe.name for recipe in read_recipes(file)] == ["one", "two", None]


def test_names_are_followed_in_tokenizers_and_anchors(tmp_path: Path) -> None:
    file = tmp_path / "r.yml"
    head = "merge_method: linear\nmodels: [{model: a}]\n"
    file.write_text(
        f"name: x\n{head}tokenizer_source: y\n---\nname: y\n{head}align: {{anchor: z}}\n---\nname: z\n{head}", "utf-8"
    )
    assert [recipe.name for recipe in read_recipes(file)] == ["z", "y", "x"]


def test_other_ways_to_write_yaml() -> None:
    merged = """
merge_method: linear
models:
  - &first {model: a, parameters: {weight: 1}}
  - {<<: *first, model: b}
  - {<<: [*first, {model: never}], model: c}
parameters: {}   # nothing
out_dtype: ~
tokenizer:
  tokens:
    "<<": {force: false}
    =: {source: b}
    2024: {source: {model: {path: b}}}
...
"""
    recipe = parse_recipe(merged)
    weight = Setting((Case((1.0,)),))
    assert [(str(g.model), g.parameters["weight"]) for g in recipe.models] == [(m, weight) for m in "abc"]
    assert recipe.parameters == {}
    assert recipe.tokenizer is not None
    assert list(recipe.tokenizer.tokens) == ["<<", "=", "2024"]
    assert recipe.tokenizer.tokens["2024"] == TokenSource("model", "b")


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "r.yml"
    file.write_bytes(b"\xef\xbb\xbfmerge_method: linear\r\nmodels:\r\n- model: a\r\n---\r\n")
    (recipe,) = read_recipes(file)
    assert recipe.models_used() == (ModelRef("a"),)
