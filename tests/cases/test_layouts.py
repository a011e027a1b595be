"""Weight layouts: merged by names and shapes they need not be known, but must come out as they came in.

What alignment makes of GPT-2's transposed layers and DeBERTa's position projections is tested in test_names.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from contract.tiny import MODELS
from recipes.llama import adapted, randomise, tensors_of
from symfuse import api
from symfuse.adapters import apply
from symfuse.errors import IncompatibleError, SymfuseError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.methods import METHODS
from symfuse.recipes import parse_recipe
from symfuse.recipes.run import run as run_recipes

BASE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}

# case, class, config, options
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "C26 NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"rotary_pct": 0.25}),
    "C26 BLOOM": ("BloomForCausalLM", "BloomConfig", {"n_head": 4, "n_layer": 2}),
    "C27 Falcon, heads": ("FalconForCausalLM", "FalconConfig", {"multi_query": False}),
    "C27 Falcon, one key": ("FalconForCausalLM", "FalconConfig", {"multi_query": True}),
    "C27 Falcon, groups": ("FalconForCausalLM", "FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "C28 Phi-3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "C29 gpt-oss": ("GptOssForCausalLM", "GptOssConfig", GROUPED | EXPERTS),
    "C30 Mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | EXPERTS),
    "C31 DeBERTa, first": (
        "DebertaModel",
        "DebertaConfig",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
}


def saved(case: str, folder: Path, seed: int) -> Path:
    class_name, config_name, options = LAYOUTS[case]
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**(BASE | options)))
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_merge_keeps_fused_and_stacked_tensors_as_they_are_stored(case: str, tmp_path: Path) -> None:
    """Same keys and shapes; each tensor the mean; the class loads it without a missing key and computes."""
    folders = [saved(case, tmp_path / name, seed) for seed, name in enumerate("ab")]
    recipe = parse_recipe({"merge_method": "linear", "models": [{"model": str(f)} for f in folders]})
    out = run_recipes([recipe]).checkpoint.save(tmp_path / "out")
    a, b, found = (tensors_of(folder) for folder in (*folders, out))
    assert found.keys() == a.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (a[name] + b[name]) / 2, rtol=2**-24, atol=1e-9)
    model, report = getattr(transformers, LAYOUTS[case][0]).from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    (output, *_) = model(input_ids=torch.tensor([[1, 5, 9]])).values()
    assert output.isfinite().all()


def stacked(folder: Path, to: Path) -> Path:
    """A Mixtral with one tensor for each map of the experts of a layer, as no release of transformers has them."""
    tensors = load_file(folder / "model.safetensors")
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        for part in ("w1", "w2", "w3"):
            out[f"{prefix}.{part}"] = torch.stack([tensors[f"{prefix}.{i}.{part}.weight"] for i in range(3)])
    to.mkdir()
    save_file(out, to / "model.safetensors")
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


def test_c30_stacks_that_no_class_has_are_refused(tmp_path: Path) -> None:
    """With the names that differ: never a silent copy. Those that a class has are merged (test_experts.py)."""
    a, b = (saved("C30 Mixtral", tmp_path / name, seed) for seed, name in enumerate("ab"))
    other = stacked(b, tmp_path / "stacked")
    recipe = parse_recipe({"merge_method": "linear", "models": [{"model": str(a)}, {"model": str(other)}]})
    with pytest.raises(SymfuseError, match=r"block_sparse_moe\.experts\.") as caught:
        run_recipes([recipe])
    assert str(other) in str(caught.value)


def test_c31_the_two_deberta_generations_are_not_mixed(tmp_path: Path) -> None:
    first = saved("C31 DeBERTa, first", tmp_path / "first", 0)
    second = MODELS["deberta"](0).save(tmp_path / "second")
    for order in ([first, second], [second, first]):
        with pytest.raises(SymfuseError, match="deberta"):
            api.merge(order)
        recipe = parse_recipe({"merge_method": "linear", "models": [{"model": str(f)} for f in order]})
        with pytest.raises(IncompatibleError, match="deberta"):
            run_recipes([recipe])


def reordered_gpt2(checkpoint: Checkpoint) -> Checkpoint:
    """The same function: neurons and heads of GPT-2 in another order, by hand in its [in, out] layout."""
    tensors = dict(checkpoint)
    size, heads = 20, 4
    rng = torch.Generator().manual_seed(4)
    for layer in range(2):
        prefix = f"transformer.h.{layer}"
        order = torch.randperm(29, generator=rng)
        tensors[f"{prefix}.mlp.c_fc.weight"] = tensors[f"{prefix}.mlp.c_fc.weight"][:, order]
        tensors[f"{prefix}.mlp.c_fc.bias"] = tensors[f"{prefix}.mlp.c_fc.bias"][order]
        tensors[f"{prefix}.mlp.c_proj.weight"] = tensors[f"{prefix}.mlp.c_proj.weight"][order]
        head = torch.randperm(heads, generator=rng)
        columns = torch.arange(size).reshape(heads, -1)[head].flatten()
        fused = torch.cat([columns + part * size for part in range(3)])
        tensors[f"{prefix}.attn.c_attn.weight"] = tensors[f"{prefix}.attn.c_attn.weight"][:, fused]
        tensors[f"{prefix}.attn.c_attn.bias"] = tensors[f"{prefix}.attn.c_attn.bias"][fused]
        tensors[f"{prefix}.attn.c_proj.weight"] = tensors[f"{prefix}.attn.c_proj.weight"][columns]
    return checkpoint.replace(tensors=tensors)


def logits(folder: Path) -> torch.Tensor:
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([[1, 5, 9, 33]])).logits
    return result


def test_c25_gpt2_is_aligned_in_its_own_orientation_and_merged(tmp_path: Path) -> None:
    """Neurons in another order come back; without alignment the average is another function (the control)."""
    ours = MODELS["gpt2-lm"](0)
    tensors = dict(reordered_gpt2(ours))
    for layer in range(2):  # only the neurons: which heads are matched is not for this version
        for part in ("c_attn.weight", "c_attn.bias", "c_proj.weight"):
            tensors[f"transformer.h.{layer}.attn.{part}"] = ours[f"transformer.h.{layer}.attn.{part}"]
    folders = [ours.save(tmp_path / "a"), ours.replace(tensors=tensors).save(tmp_path / "b")]
    models = [{"model": str(folder)} for folder in folders]
    plain = {"merge_method": "linear", "models": models}
    aligned = run_recipes([parse_recipe(plain | {"align": {"axes": "ffn", "anchor": 1}})]).checkpoint
    expected = logits(folders[0])
    torch.testing.assert_close(logits(folders[1]), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(logits(aligned.save(tmp_path / "aligned")), expected, rtol=0, atol=1e-5)
    other = logits(run_recipes([parse_recipe(plain)]).checkpoint.save(tmp_path / "plain"))
    assert float((other - expected).abs().max()) > 0.01


def test_c25_the_same_function_with_heads_in_another_order(tmp_path: Path) -> None:
    """The control of this file's own layout: wrong orientation or thirds would move the outputs."""
    ours = MODELS["gpt2-lm"](0)
    moved = reordered_gpt2(ours)
    assert any(not torch.equal(ours[name], moved[name]) for name in ours)
    torch.testing.assert_close(
        logits(moved.save(tmp_path / "moved")), logits(ours.save(tmp_path / "ours")), rtol=0, atol=1e-9
    )


def test_c25_an_adapter_of_gpt2_is_added_transposed(tmp_path: Path) -> None:
    ours = open_checkpoint(MODELS["gpt2-lm"](0).save(tmp_path / "base"))
    module = "transformer.h.0.attn.c_proj"  # square: its shape does not tell
    rng = torch.Generator().manual_seed(0)
    factors = {
        f"base_model.model.{module}.lora_A.weight": torch.randn(2, 20, generator=rng),
        f"base_model.model.{module}.lora_B.weight": torch.randn(20, 2, generator=rng),
    }
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = '{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["c_proj"], "fan_in_fan_out": true}'
    (folder / "adapter_config.json").write_text(config, "utf-8")
    name = f"{module}.weight"
    transposed = dict(ours) | {name: ours[name].T}
    expected = adapted(transposed, folder)[name].T
    torch.testing.assert_close(apply(ours, folder)[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["della", "iso_c", "iso_cts", "model_stock", "nuslerp", "sce", "tsv"])
@pytest.mark.parametrize("label", ["gpt2-lm", "deberta-mlm"])
def test_merging_by_method_keeps_the_layout_of_declared_families(label: str, name: str) -> None:
    """Entry by entry methods do not care for layouts; those by rows or matrices must give the stored shape back."""
    make: Callable[..., Checkpoint] = MODELS[label]
    known = {f"m{seed}": open_checkpoint(dict(c := make(seed)), config=c.config, name=f"m{seed}") for seed in range(3)}
    method = METHODS[name]
    count = 1 if method.models[1] == 1 else 2
    recipe: dict[str, Any] = {"merge_method": name, "models": [{"model": m} for m in ["m1", "m2"][:count]]}
    recipe["parameters"] = {p.name: 0.5 for p in method.parameters.values() if p.default is None}
    if method.base == "required":
        recipe["base_model"] = "m0"
    merged = run_recipes([parse_recipe(recipe)], known).checkpoint
    assert merged.keys() == known["m0"].keys()
    for key in merged:
        assert merged[key].shape == known["m0"][key].shape
        assert merged[key].isfinite().all(), key
