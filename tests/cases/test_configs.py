"""Configs that differ, in families with and without a declaration: inputs that broke other tools. By their cases."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.tiny import MODELS, case, real
from model.test_undeclared import LLAMA, changed, of, tiny, unknown
from model.test_undeclared import llama as declared_llama
from symfuse import api
from symfuse.architectures.base import declaration
from symfuse.errors import IncompatibleError, LayoutError, SpecError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model, require_same_shape
from symfuse.model.config import differences
from symfuse.recipes import parse_recipe
from symfuse.recipes.check import check_all
from symfuse.recipes.stage import open_models, prepare

Make = Callable[..., Checkpoint]


@pytest.fixture(params=[declared_llama, unknown], ids=["declared", "unknown"])
def llama(request: pytest.FixtureRequest) -> Make:
    make: Make = request.param
    return make


def notes(*checkpoints: Checkpoint, **options: Any) -> tuple[str, ...]:
    return require_same_shape([of(c) for c in checkpoints], **options)


def refused(message: str, *checkpoints: Checkpoint) -> None:
    """In both orders."""
    for models in (checkpoints, checkpoints[::-1]):
        with pytest.raises(IncompatibleError, match=message):
            notes(*models)


def test_c05_both_sizes_of_the_vocabulary_and_the_ways_out(llama: Make) -> None:
    refused(
        r"vocabulary sizes differ: (64 and 66|66 and 64); .*\{source: union\}` .* `tokenizer_source: shared",
        llama(),
        llama(1, vocab_size=66),
    )


def test_c47_activations(llama: Make) -> None:
    a, b = llama(), llama(1, hidden_act="gelu")
    refused(r"hidden_act: '(silu|gelu)' and '(silu|gelu)', so that the same weights compute something else", a, b)
    (note,) = notes(a, b, force_config=True)
    assert note.endswith("config.json differs in hidden_act: 'silu' and 'gelu'; the base's is kept, though the others "
                         "computed with theirs")  # fmt: skip
    assert notes(a, changed(b, hidden_act="swish")) == ()


def test_c47_one_activation_in_an_old_and_a_new_field() -> None:
    """The first Gemma's `gelu` is its approximation by tanh, as the new field says."""
    new = tiny("GemmaForCausalLM", LLAMA | {"hidden_act": "gelu_pytorch_tanh"})
    field = changed(new, hidden_act=None, hidden_activation="gelu_pytorch_tanh")
    both = changed(new, hidden_act="gelu", hidden_activation="gelu_pytorch_tanh")
    old = changed(new, hidden_act="gelu")
    for one in (new, field, both, old):
        for other in (new, field, both, old):
            assert differences(one, other) == []
    refused("hidden_act", new, changed(new, hidden_act="silu"))


def test_c59_the_base_of_rotary_embeddings(llama: Make) -> None:
    a, b = llama(), llama(1, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    refused(r"rope_parameters\.rope_theta: (10000\.0 and 1000000\.0|1000000\.0 and 10000\.0)", a, b)
    assert len(notes(a, b, force_config=True)) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 1_000_000}, {"rope_theta": 1e6, "rope_type": "default"}),
        ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_theta": 1e6, "rope_type": "default"}),
        ({}, {"rope_theta": 10000.0, "rope_type": "default"}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_theta": 500000, "rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_c59_equal_under_old_and_new_names(llama: Make, old: dict[str, Any], new: dict[str, Any]) -> None:
    a = changed(llama(), rope_parameters=new)
    b = changed(llama(1), **{"rope_parameters": None, **old})
    assert differences(a, b) == differences(b, a) == []
    other = changed(llama(1), **{"rope_parameters": None, **old, "rope_theta": 77.0})
    assert [d.field for d in differences(a, other) if d.matters] == ["rope_parameters.rope_theta"]


def test_c59_rotary_settings_by_type_of_layer(llama: Make) -> None:
    """Gemma 3 says them once for windows and once for all, in old files under two fields."""
    new = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    a = changed(llama(), rope_parameters=new)
    b = changed(llama(1), rope_parameters=None, rope_theta=1e6, rope_local_base_freq=1e4)
    c = changed(llama(1), rope_parameters=None, rope_theta=1e6, rope_local_base_freq=2e4)
    assert differences(a, b) == []
    assert [d.field for d in differences(a, c)] == ["rope_parameters.sliding_attention.rope_theta"]


def test_c60_scalars_outside_tensors(llama: Make) -> None:
    refused(r"rms_norm_eps: ", llama(), llama(1, rms_norm_eps=1e-2))
    one, other = (tiny("Gemma2ForCausalLM", LLAMA | {"query_pre_attn_scalar": s}, name=f"g{s}") for s in (8, 256))
    refused(r"query_pre_attn_scalar: ", one, other)


def test_c60_a_window_and_none() -> None:
    """`null` is no window; where the field is absent, the family's default holds, which is not known."""
    mistral, other = (tiny("MistralForCausalLM", LLAMA | {"sliding_window": size}) for size in (5, 7))
    whole = Checkpoint(dict(mistral), {**mistral.config, "sliding_window": None}, name="whole")
    refused("sliding_window: (5 and 7|7 and 5)", mistral, other)
    refused("sliding_window: (5 and False|False and 5)", mistral, whole)
    assert len(notes(mistral, changed(mistral, sliding_window=None))) == 1


def test_c60_what_does_not_matter_is_noted(llama: Make) -> None:
    a = llama()
    b = changed(
        llama(1), attention_dropout=0.3, use_cache=False, eos_token_id=5, max_position_embeddings=99,
        initializer_range=0.5, _name_or_path="other", transformers_version="4.0", dtype="bfloat16",
    )  # fmt: skip
    (note,) = notes(a, b)
    assert "use_cache: True and False" in note
    assert note.endswith("the base's is kept")
    assert {d.field for d in differences(a, b)} == {
        "attention_dropout", "use_cache", "eos_token_id", "max_position_embeddings", "initializer_range", "dtype",
    }  # fmt: skip


def test_c60_fields_that_are_nested(llama: Make) -> None:
    inner = {"text_config": {"rms_norm_eps": 1e-6, "attention_dropout": 0.0}}
    a, b = changed(llama(), **inner), changed(llama(), text_config={"rms_norm_eps": 1e-5, "attention_dropout": 0.1})
    found = differences(a, b)
    assert [(d.field, d.matters) for d in found] == [
        ("text_config.rms_norm_eps", True), ("text_config.attention_dropout", False),
    ]  # fmt: skip


def test_a_field_that_older_versions_did_not_write_is_noted_only(llama: Make) -> None:
    a = llama()
    old = changed(llama(1), head_dim=None, num_key_value_heads=2, attention_bias=None, mlp_bias=None, rms_norm_eps=None)
    assert differences(a, old) == []
    (found,) = differences(a, changed(llama(1), new_option="something"))
    assert (found.field, found.ours, found.theirs, found.matters) == ("new_option", None, "something", False)


def test_c61_both_numbers_of_layers(llama: Make) -> None:
    refused(r"numbers of layers differ: (2 and 3|3 and 2)", llama(), llama(1, num_hidden_layers=3))


def test_c62_both_widths(llama: Make) -> None:
    sizes = r"hidden sizes \(residual stream\) differ: (32 and 48|48 and 32) \(hidden_size: "
    words = sizes + r"|hidden sizes differ: .* \(hidden_size\);"
    refused(words, llama(), llama(1, hidden_size=48))
    refused(r"feed-forward sizes differ: ", llama(), llama(1, intermediate_size=40))


def test_c65_layers_of_their_own_width() -> None:
    """Pruned in one layer: fine if all are, else the tensors are named. A declaration has one width for all layers."""

    def pruned(seed: int, llama: Make = unknown) -> Checkpoint:
        whole = llama(seed)
        cut = {f"model.layers.1.mlp.{n}_proj.weight": whole[f"model.layers.1.mlp.{n}_proj.weight"][:40].clone()
               for n in ("up", "gate")}  # fmt: skip
        down = "model.layers.1.mlp.down_proj.weight"
        return changed(whole, {**cut, down: whole[down][:, :40].clone()})

    assert notes(pruned(0), pruned(1)) == ()
    refused(r"3 tensors differ in shape: .*up_proj\.weight: \((40|48), 32\) and \((40|48), 32\)", pruned(0), unknown(1))
    with pytest.raises(
        LayoutError, match=r"(?s)model0: model\.layers\.1\.mlp\.gate_proj\.weight: .* \(40, 32\) .* \(48, 32\)"
    ):
        of(pruned(0, declared_llama))


def test_families_are_not_mixed() -> None:
    mistral = tiny("MistralForCausalLM", LLAMA, 1)
    refused("one is a (llama|mistral), the other a (llama|mistral)", declared_llama(), mistral)


def test_known_families_say_what_differs_too() -> None:
    """Fields that the declaration reads matter; `force_config` lets them pass, with a note."""
    a = MODELS["bert"](0)
    b = changed(MODELS["bert"](1), hidden_act="relu", attention_probs_dropout_prob=0.7)
    found = {d.field: d.matters for d in differences(a, b)}
    assert found == {"hidden_act": True, "attention_probs_dropout_prob": False}
    models = [Model.of(a), Model.of(b)]
    with pytest.raises(IncompatibleError, match=r"axis 'ffn' has different symmetries|hidden_act"):
        require_same_shape(models)
    forced = require_same_shape(models, force_config=True)
    assert "hidden_act: 'gelu' and 'relu'; the base's is kept" in forced[0]
    assert torch.equal(a["embeddings.word_embeddings.weight"], models[0].read("embeddings.word_embeddings.weight"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rope_parameters", 3, "rope_parameters is 3, expected a JSON object"),
        ("rope_scaling", [1], r"rope_scaling is \[1\], expected a JSON object"),
        ("rope_parameters", {"rope_theta": "x"}, "rope_theta is 'x', expected a number"),
        ("text_config", 3, "text_config is 3, expected a JSON object"),
        ("architectures", 3, "architectures is 3, expected a list"),
        ("layer_types", 3, "layer_types is 3, expected a list"),
    ],
)
def test_fields_of_another_kind(llama: Make, key: str, value: Any, words: str) -> None:
    """Said with the model's name by the merge, and by a check among its problems."""
    given = {key: value}
    pair = [changed(llama(), **given).replace(name="a"), changed(llama(1), **given).replace(name="b")]
    with pytest.raises(SpecError, match=f"a: config.json: {words}"):
        differences(*pair)
    recipe = parse_recipe({"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]})
    known = dict(zip("ab", pair, strict=True))
    with pytest.raises(SpecError, match=f"a: config.json: {words}"):
        prepare(recipe, open_models(recipe, known))
    problems = check_all([recipe], known, sample=False)[0].problems
    assert {problem.exit_code for problem in problems} == {4}
    assert re.search(f"a: config.json: {words}", problems[0].text)
    assert all(re.search(f"[ab]: config.json: {words}", problem.text) for problem in problems)


def test_layer_types_that_are_no_names(llama: Make) -> None:
    pair = [changed(llama(seed), layer_types=[{"a": 1}, ["b"]]) for seed in (0, 1)]
    assert differences(*pair) == []


def test_how_a_model_was_trained_decides_nothing() -> None:
    """SCEPTR's own block says of which classes it was trained, and differs between checkpoints of one shape."""
    from contract.tiny import sceptr
    from symfuse.model.config import differences

    models = [
        (model := sceptr(seed)).replace(config={**model.config, "sceptr": {"training_delegate": {"class": name}}})
        for seed, name in enumerate(("ClTrainingDelegate", "MlmTrainingDelegate"))
    ]
    assert not [difference for difference in differences(*models) if difference.matters]
    assert api.merge(models)


SIBLINGS = ["clip", "siglip", "llama-lm", "bert-sequence", "neox-lm", "mixtral-lm"]


@pytest.mark.parametrize("label", SIBLINGS)
def test_a_module_and_its_folder_have_one_config(label: str, tmp_path: Path) -> None:
    """A file leaves defaults out, of nested configs too, and numbers labels by strings; a module has them all."""
    module: Any = real(case(label).checkpoint)
    module.save_pretrained(tmp_path / "folder")
    folder, live = open_checkpoint(tmp_path / "folder"), open_checkpoint(module)
    weights = open_checkpoint(module.state_dict(), config=module.config.to_dict())
    assert "return_dict" in live.config.keys() - folder.config.keys()
    for one in (live, weights):
        assert differences(one, folder) == differences(folder, one) == []
        assert notes(one, folder) == ()
    part = "vision_config" if "vision_config" in folder.config else ""
    other = changed(
        folder, **({part: folder.config[part] | {"hidden_act": "relu"}} if part else {"hidden_act": "relu"})
    )
    for pair in ((live, other), (other, live)):
        with pytest.raises(
            IncompatibleError, match=rf"config\.json differs in {part}\.?hidden_act: '\w+' and "
        ) as error:
            notes(*pair)
        assert "{" not in str(error.value)


@pytest.mark.parametrize("label", ["clip", "siglip"])
def test_a_module_of_two_towers_is_matched_with_and_merged_into_a_folder(label: str, tmp_path: Path) -> None:
    module: Any = real(MODELS[label](1))
    real(case(label).checkpoint).save_pretrained(tmp_path / "folder")  # type: ignore[operator]
    folder = str(tmp_path / "folder")
    assert api.match(module, folder).elements
    merged = api.merge([module, folder])
    for name, tensor in open_checkpoint(module).items():
        torch.testing.assert_close(merged[name], (tensor + open_checkpoint(folder)[name]) / 2)


@pytest.mark.parametrize(
    ("label", "fields", "words"),
    [
        ("nemotron-h-lm", {"layer_types": 3}, "layer_types is 3, expected a list"),
        ("qwen3-next-lm", {"layer_types": 3}, "layer_types is 3, expected a list"),
        ("exaone4-lm", {"layer_types": [3, 3]}, r"layer_types is \[3, 3\], expected a list, each entry of it a name"),
        (
            "exaone4-lm",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries, expected one for each layer, 2",
        ),
        ("exaone4-lm", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0, expected a positive integer"),
        ("hy-v3-lm", {"mlp_layer_types": 3}, "mlp_layer_types is 3, expected a list"),
        ("smollm3-lm", {"no_rope_layers": 3}, "no_rope_layers is 3, expected a list"),
        ("llama4-lm", {"moe_layers": ["x"]}, "moe_layers is .*, expected a list, each entry of it an integer"),
        ("bamba-lm", {"attn_layer_indices": [[]]}, "attn_layer_indices is .*, expected a list"),
        ("swin", {"depths": [2]}, r"depths \[2\], num_heads .*; expected lists of one length"),
        ("wav2vec2-ctc", {"conv_kernel": [5, 0, 2]}, "conv_dim .*, conv_kernel .*; expected lists of one length"),
        ("resnet-published", {"inner_sizes": [7]}, r".*inner_sizes \[7\]; expected"),
        ("resnet-published", {"depths": [True, 1]}, r"depths is \[True, 1\], expected a list, each entry of it an int"),
        ("resnet-published", {"hidden_sizes": [], "depths": [], "inner_sizes": []}, ".*expected lists .* not empty"),
        ("resnet-published", {"layer_type": "x"}, "layer_type is 'x', expected basic or bottleneck"),
        ("llava-lm", {"text_config": {"model_type": "resnet"}}, "text_config.model_type is 'resnet', which has no"),
        ("mistral3-lm", {"vision_config": {"model_type": "resnet"}}, "vision_config.model_type is 'resnet', which has"),
        ("internvl-lm", {"downsample_ratio": 0}, "downsample_ratio is 0, expected a number above 0"),
        ("internvl-lm", {"downsample_ratio": float("nan")}, "downsample_ratio is nan, expected a finite number"),
    ],
)
def test_fields_that_a_declaration_cannot_have(label: str, fields: dict[str, Any], words: str) -> None:
    config = dict(MODELS[label]().config) | fields
    with pytest.raises(SpecError, match=f"a: config.json: {words}"):
        declaration(config, (), "a")


def test_more_dense_layers_than_there_are_take_no_time() -> None:
    few, many = (
        declaration(dict(MODELS["glm4-moe-lm"]().config) | {"first_k_dense_replace": n}, (), "a")[0]
        for n in (2, 10**15)
    )
    assert few == many
