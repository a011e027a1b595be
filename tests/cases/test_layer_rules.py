"""D01 to D06: what the config of an output says of its layers, and what its class demands, are what they were."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import symfuse
from command import run as command
from contract.tiny import DECODER, GEMMA, QWEN_MIXTURE, T5, randomise
from symfuse.errors import IncompatibleError, SymfuseError

ORDER = [0, 1, 1, 2, 3]  # of slices [0, 2] and [1, 4]
DEEP = {"num_hidden_layers": 4}
EXPERTS = QWEN_MIXTURE | DEEP | {"moe_intermediate_size": 20}  # the grouped products refuse rows of odd lengths


def saved(kind: str, config: str, options: dict[str, Any], folder: Path, without: Sequence[str] = ()) -> nn.Module:
    """A model in a folder, its config without some fields, as older versions have written it."""
    made = getattr(transformers, config)(**options)
    module: Any = randomise(getattr(transformers, kind)(made), 0).float()
    module.save_pretrained(folder)
    path = folder / "config.json"
    said = {key: value for key, value in json.loads(path.read_text()).items() if key not in without}
    path.write_text(json.dumps(said | {key: options[key] for key in options if key not in said and key not in without}))
    return module


def in_order(module: Any, order: Sequence[int]) -> nn.Module:
    """The module with these of its layers, each as it is, and what its config says of each of them."""
    module.model.layers = nn.ModuleList([copy.deepcopy(module.model.layers[at]) for at in order])
    config = module.config
    config.use_cache, config.num_hidden_layers = False, len(order)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[at] for at in order]
    return module


def sliced(folder: Path, *ranges: tuple[int, int], part: str = "") -> dict[str, Any]:
    slices = [{"sources": [{"model": str(folder), "layer_range": list(layers)}]} for layers in ranges]
    return {"merge_method": "passthrough", **({"modules": {part: {"slices": slices}}} if part else {"slices": slices})}


def loaded(kind: str, folder: Path) -> nn.Module:
    """With nothing missing and nothing left over."""
    module, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    return module


def logits(module: Any, **inputs: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(3, 35)[None] % 61  # longer than the windows
    with torch.inference_mode():
        found: torch.Tensor = module.eval()(input_ids=ids, use_cache=False, **inputs).logits
    return found


RULES: dict[str, tuple[str, str, dict[str, Any], Sequence[str]]] = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA | DEEP, ["layer_types"]),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA | DEEP | {"sliding_window_pattern": 3}, ["layer_types"],
    ),
    "qwen2": (
        "Qwen2ForCausalLM", "Qwen2Config",
        DECODER | DEEP | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, ["layer_types"],
    ),
    "qwen3": (
        "Qwen3ForCausalLM", "Qwen3Config",
        DECODER | DEEP | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}, ["layer_types"],
    ),
    "smollm3": (
        "SmolLM3ForCausalLM", "SmolLM3Config", DECODER | DEEP | {"no_rope_layer_interval": 2},
        ["no_rope_layers", "layer_types"],
    ),
    # Undeclared, with a window in three of four layers.
    "cohere2": (
        "Cohere2ForCausalLM", "Cohere2Config", DECODER | DEEP | {"sliding_window": 5, "sliding_window_pattern": 2},
        ["layer_types"],
    ),
    # D02: numbers of layers, a stride, and how many of the first layers are dense.
    "named": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", EXPERTS | {"mlp_only_layers": [1]}, []),
    "llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        DECODER | DEEP | {
            "num_local_experts": 4, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2,
            "intermediate_size_mlp": 31,
        },
        ["moe_layers", "no_rope_layers", "layer_types"],
    ),
    "stride": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS | {"decoder_sparse_step": 2}, []),
}  # fmt: skip


def moved_rules(name: str, tmp_path: Path) -> None:
    kind, config, options, without = RULES[name]
    module = saved(kind, config, options, tmp_path / "in", without)
    symfuse.merge_recipe(sliced(tmp_path / "in", (0, 2), (1, 4))).save(tmp_path / "out")
    expected, before = logits(in_order(module, ORDER)), json.loads((tmp_path / "out" / "config.json").read_text())
    torch.testing.assert_close(logits(loaded(kind, tmp_path / "out")), expected, atol=1e-5, rtol=1e-5)
    assert before["num_hidden_layers"] == 5


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen2", "qwen3", "smollm3", "cohere2"])
def test_d01_rules_implied_by_the_number_of_a_layer_move_with_it(name: str, tmp_path: Path) -> None:
    moved_rules(name, tmp_path)


@pytest.mark.parametrize("name", ["named", "stride", "llama4"])
def test_d02_dense_layers_stay_dense(name: str, tmp_path: Path) -> None:
    moved_rules(name, tmp_path)


def test_d01_a_config_that_says_the_old_rule_computes_something_else(tmp_path: Path) -> None:
    """What the two tests above see: the same weights under rules by number alone."""
    module = saved(*RULES["gemma2"][:3], tmp_path / "in", RULES["gemma2"][3])
    symfuse.merge_recipe(sliced(tmp_path / "in", (0, 2), (1, 4))).save(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("layer_types")[:3] == ["sliding_attention", "full_attention", "full_attention"]
    path.write_text(json.dumps(config))
    wrong = logits(loaded("Gemma2ForCausalLM", tmp_path / "out"))
    assert (wrong - logits(in_order(module, ORDER))).abs().max() > 0.1


def test_d02_what_no_field_can_say_is_refused_before_work(tmp_path: Path) -> None:
    """Of Jamba each second layer attends, by a period; there is no list of the others."""
    options = DECODER | DEEP | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 3, "mamba_d_state": 4, "mamba_dt_rank": 3, "use_mamba_kernels": False,
    }  # fmt: skip
    saved("JambaForCausalLM", "JambaConfig", options, tmp_path / "in")
    with pytest.raises(IncompatibleError, match=r"layer 2 of the output.*layer 1.*attn_layer_period: 2"):
        symfuse.merge_recipe(sliced(tmp_path / "in", (0, 2), (1, 4)))
    symfuse.merge_recipe(sliced(tmp_path / "in", (0, 2), (0, 4)))  # where all keep their kind
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(sliced(tmp_path / "in", (0, 2), (1, 4))))
    checked = command("check", str(recipe))
    assert checked.exit_code != 0
    assert "layer 2 of the output" in " ".join(checked.output.split())
    done = command("run", str(recipe), "-o", str(tmp_path / "out"))
    assert done.exit_code != 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_d03_the_table_of_the_first_layer_serves_the_new_first_layer(part: str, tmp_path: Path) -> None:
    options = T5 | {"num_layers": 4, "num_decoder_layers": 4}
    module: Any = saved("T5ForConditionalGeneration", "T5Config", options, tmp_path / "in", ["num_decoder_layers"])
    other = "decoder" if part == "encoder" else "encoder"
    recipe = sliced(tmp_path / "in", (1, 4), part=part)
    recipe["modules"] |= sliced(tmp_path / "in", (0, 4), part=other)["modules"]
    symfuse.merge_recipe(recipe).save(tmp_path / "out")
    stack = getattr(module, part)
    first, second = (stack.block[at].layer[0].SelfAttention for at in (0, 1))
    second.has_relative_attention_bias, second.relative_attention_bias = True, first.relative_attention_bias
    stack.block = stack.block[1:]
    ids = torch.arange(7)[None] + 3
    expected = logits(module, decoder_input_ids=ids)
    found = logits(loaded("T5ForConditionalGeneration", tmp_path / "out"), decoder_input_ids=ids)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def predicting(folder: Path, *, predictor: bool = True) -> nn.Module:
    """A glm4_moe with a layer behind the last one that predicts a second token, as it is published."""
    options = DECODER | DEEP | {
        "moe_intermediate_size": 20, "n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    module = saved("Glm4MoeForCausalLM", "Glm4MoeConfig", options, folder)
    if predictor:
        tensors = load_file(folder / "model.safetensors")
        last = "model.layers.3."
        more = {n.replace(last, "model.layers.4."): t + 1 for n, t in tensors.items() if n.startswith(last)}
        more["model.layers.4.eh_proj.weight"] = torch.randn(24, 48)
        save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    return module


def test_d04_layers_that_predict_more_tokens_go_behind_the_new_last_one(tmp_path: Path) -> None:
    module = predicting(tmp_path / "in")
    symfuse.merge_recipe(sliced(tmp_path / "in", (0, 4), (2, 4))).save(tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    behind = {name for name in before if name.startswith("model.layers.4.")}
    assert len(behind) > 10
    for name in behind:
        torch.testing.assert_close(after[name.replace(".4.", ".6.")], before[name], rtol=0, atol=0)
    assert "model.layers.4.eh_proj.weight" not in after
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (6, 1)
    kind = transformers.Glm4MoeForCausalLM
    found, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert all(name.startswith("model.layers.6.") for name in report["unexpected_keys"])
    expected = logits(in_order(module, [0, 1, 2, 3, 2, 3]))
    torch.testing.assert_close(logits(found), expected, atol=1e-5, rtol=1e-5)


def test_d04_the_first_dense_layers_are_counted_anew(tmp_path: Path) -> None:
    module = predicting(tmp_path / "in", predictor=False)
    symfuse.merge_recipe(sliced(tmp_path / "in", (1, 4))).save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["first_k_dense_replace"] == 0
    expected = logits(in_order(module, [1, 2, 3]))
    torch.testing.assert_close(logits(loaded("Glm4MoeForCausalLM", tmp_path / "out")), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(IncompatibleError, match="first_k_dense_replace: 1"):  # a dense layer behind a sparse one
        symfuse.merge_recipe(sliced(tmp_path / "in", (1, 3), (0, 3)))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The folders of a model with a predicting layer, and of one that has lost it in training."""
    folders = [tmp_path_factory.mktemp(name) for name in ("base", "tuned")]
    for folder in folders:
        predicting(folder, predictor=folder is folders[0])
    return list(map(str, folders))


def test_d05_a_layer_that_one_model_lost_is_named(tuned: list[str], tmp_path: Path) -> None:
    refused = command("merge", *tuned, "-o", str(tmp_path / "out"))
    assert refused.exit_code != 0
    assert "--foreign" in refused.output
    assert "layers.4." in refused.output


@pytest.mark.parametrize("foreign", ["drop", "keep"])
@pytest.mark.parametrize("order", [1, -1])
def test_d05_a_tune_that_lost_its_predicting_layer(order: int, foreign: str, tuned: list[str], tmp_path: Path) -> None:
    folders = tuned[::order]
    done = command("merge", *folders, "-o", str(tmp_path / "out"), "--foreign", foreign)
    assert done.exit_code == 0, done.output
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    there = any(name.startswith("model.layers.4.") for name in tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (there, config["num_nextn_predict_layers"]) == ((True, 1) if foreign == "keep" else (False, 0))
    kind = transformers.Glm4MoeForCausalLM
    _, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]


def test_d06_drop_takes_nothing_that_the_class_demands(tmp_path: Path) -> None:
    """One file lacks a bias that its class would fill in at random."""
    options = DECODER | DEEP
    for name in ("whole", "less"):
        saved("BitNetForCausalLM", "BitNetConfig", options, tmp_path / name)
    path = tmp_path / "less" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    names = ["whole", "less"]
    for order in (names, names[::-1]):
        models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in order]
        recipe = {"merge_method": "linear", "models": models}
        with pytest.raises(IncompatibleError, match=r"BitNetForCausalLM.*model\.layers\.1\.mlp\.up_proj\.weight"):
            symfuse.merge_recipe(recipe | {"foreign": "drop"})
    merged = symfuse.merge_recipe(recipe | {"foreign": "keep"})
    torch.testing.assert_close(
        merged["model.layers.1.mlp.up_proj.weight"],
        load_file(tmp_path / "whole" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"],
    )


@pytest.mark.parametrize(
    ("kind", "config", "field"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 3}),
        ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True}),
        ("BitNetForCausalLM", "BitNetConfig", {"num_hidden_layers": 3}),  # undeclared
        ("BitNetForCausalLM", "BitNetConfig", {"vocab_size": 67}),
    ],
)
def test_an_output_that_its_config_does_not_describe_is_not_written(
    kind: str, config: str, field: dict[str, int], tmp_path: Path
) -> None:
    """The guard stands before every byte, of Python's merges too."""
    saved(kind, config, DECODER | {"sliding_window": 5}, tmp_path / "in")
    merged = symfuse.merge([tmp_path / "in", tmp_path / "in"])
    merged.save(tmp_path / "out")
    with pytest.raises(SymfuseError):
        merged.replace(config={**merged.config, **field}).save(tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_a_moved_model_that_its_config_does_not_describe_is_not_written(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved("LlamaForCausalLM", "LlamaConfig", DECODER, tmp_path / name)
    moved = symfuse.match(tmp_path / "a", tmp_path / "b", axes="ffn")(symfuse.open(tmp_path / "a"))
    moved.save(tmp_path / "out")
    with pytest.raises(SymfuseError):
        moved.replace(config={**moved.config, "mlp_bias": True}).save(tmp_path / "wrong")


def test_d01_layers_of_two_rules_are_not_mixed(tmp_path: Path) -> None:
    """Of gemma2 each second layer has a window: layer 0 of one and layer 1 of another do not compute alike."""
    for name in ("a", "b"):
        saved(*RULES["gemma2"][:3], tmp_path / name, RULES["gemma2"][3])

    def recipe(start: int) -> dict[str, Any]:
        ranges = {"a": [0, 2], "b": [start, start + 2]}
        sources = [{"model": str(tmp_path / name), "layer_range": layers} for name, layers in ranges.items()]
        return {
            "merge_method": "slerp",
            "base_model": str(tmp_path / "a"),
            "parameters": {"t": 0.5},
            "slices": [{"sources": sources}],
        }

    symfuse.merge_recipe(recipe(2))
    with pytest.raises(
        IncompatibleError, match=r"layer 0 of the output would not compute as layer 1 of .*b: layer_types"
    ):
        symfuse.merge_recipe(recipe(1))
