"""LoRA adapters against peft itself: what peft computes with the adapter beside the base, the applied model computes
too, in float64; and what is extracted loads in peft."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from symfuse import adapters
from symfuse.errors import CheckpointError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint

peft = pytest.importorskip("peft", reason="peft is not installed")

LLAMA: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 37, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 37, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29,
    "max_position_embeddings": 37, "num_labels": 3,
}  # fmt: skip
VIT: dict[str, Any] = {
    "image_size": 12, "patch_size": 4, "hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 29, "num_labels": 3,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama-bias": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"attention_bias": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama-body": ("LlamaModel", "LlamaConfig", LLAMA),
    "bert": ("BertForSequenceClassification", "BertConfig", BERT),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
}
QKV = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": [*QKV, "up_proj", "down_proj", "lm_head"]}),
    "rslora": ("llama", {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": QKV}),
    "patterns": (
        "llama",
        {
            "r": 4, "lora_alpha": 8, "target_modules": [*QKV, "down_proj"],
            "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.k_proj": 3, "proj": 1},
            "alpha_pattern": {r".*\.0\..*v_proj": 32, "o_proj": 5},
        },
    ),
    "rslora patterns": (
        "llama",
        {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": QKV, "rank_pattern": {"k_proj": 2}},
    ),
    "lora_bias": ("llama-bias", {"r": 2, "lora_alpha": 6, "lora_bias": True, "target_modules": QKV}),
    "bias lora_only": ("llama-bias", {"r": 2, "bias": "lora_only", "target_modules": ["q_proj"]}),
    "embedding": ("llama", {"r": 2, "lora_alpha": 6, "target_modules": ["embed_tokens", "q_proj"]}),
    "modules_to_save": (
        "llama",
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
    ),
    "gaussian": ("llama", {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"}),
    "orthogonal": ("llama", {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}),
    "conv1d": ("gpt2", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "conv1d biases": ("gpt2", {"r": 4, "bias": "lora_only", "target_modules": ["attn.c_proj"]}),
    "bert": ("bert", {"r": 3, "lora_alpha": 5, "task_type": "SEQ_CLS", "target_modules": ["query", "dense"]}),
    "bert, all biases": ("bert", {"r": 3, "task_type": "SEQ_CLS", "bias": "all", "target_modules": ["query"]}),
    "bert embedding": ("bert", {"r": 3, "target_modules": ["word_embeddings", "query"]}),
    "convolution": ("vit", {"r": 3, "target_modules": ["projection"]}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """peft warns about what it sets by itself, such as fan_in_fan_out."""
    with warnings.catch_warnings(action="ignore"):
        yield


def base_folder(kind: str, folder: Path) -> Path:
    class_name, config_name, settings = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**settings)).double()
    randomise(model, lambda _: True)
    model.save_pretrained(folder)
    return folder


def load(kind: str, folder: Path) -> Any:
    loaded, info = getattr(transformers, MODELS[kind][0]).from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded.eval()


def randomise(model: torch.nn.Module, which: Callable[[str], bool]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if which(name):
                parameter.copy_(torch.randn_like(parameter) / 4)


@torch.no_grad()
def outputs(kind: str, model: Any) -> Tensor:
    torch.manual_seed(1)
    if kind == "vit":
        return model(pixel_values=torch.randn(2, 3, 12, 12, dtype=torch.float64)).logits
    answer = model(input_ids=torch.randint(3, 61, (2, 11)))
    return answer.last_hidden_state if kind == "llama-body" else answer.logits


def trained(kind: str, options: dict[str, Any], folder: Path, base: Path, seed: int = 2) -> Tensor:
    """Save an adapter with random numbers in everything that training changes; return the outputs with it."""
    model = peft.get_peft_model(load(kind, base), peft.LoraConfig(**options))
    torch.manual_seed(seed)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    randomise(model, trainable.__contains__)
    model.save_pretrained(folder)
    return outputs(kind, model.eval())


@pytest.mark.parametrize("case", CASES)
def test_the_applied_model_computes_what_peft_computes(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    base = base_folder(kind, tmp_path / "base")
    expected = trained(kind, options, tmp_path / "adapter", base)
    applied = adapters.open_adapter(tmp_path / "adapter", base)
    assert applied.name == "base+adapter"
    got = outputs(kind, load(kind, applied.save(tmp_path / "out")))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    assert float((expected - outputs(kind, load(kind, base))).abs().max()) > 1e-2  # the adapter does something


def test_a_wrong_scale_or_orientation_is_noticed(tmp_path: Path) -> None:
    """Negative controls: the same comparison fails if the config's alpha is another, or A and B are read otherwise."""
    base = base_folder("gpt2", tmp_path / "base")
    expected = trained("gpt2", {"r": 4, "target_modules": ["attn.c_proj"]}, tmp_path / "adapter", base)
    path = tmp_path / "adapter" / "adapter_config.json"
    good = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(good | {"lora_alpha": 16}), "utf-8")
    wrong = adapters.apply(open_checkpoint(base), tmp_path / "adapter").save(tmp_path / "alpha")
    assert not torch.allclose(outputs("gpt2", load("gpt2", wrong)), expected, atol=1e-3)
    path.write_text(json.dumps(good), "utf-8")
    config = json.loads((base / "config.json").read_text("utf-8"))
    other = open_checkpoint(base, config=config | {"model_type": "unknown"})
    path.write_text(json.dumps(good | {"fan_in_fan_out": False}), "utf-8")
    wrong = adapters.apply(other, tmp_path / "adapter")
    right = adapters.apply(open_checkpoint(base), tmp_path / "adapter")  # the family decides
    name = "transformer.h.0.attn.c_proj.weight"
    torch.testing.assert_close(wrong[name] - other[name], (right[name] - other[name]).T)
    assert not torch.allclose(wrong[name], right[name], atol=1e-3)
    path.write_text(json.dumps(good | {"fan_in_fan_out": True}), "utf-8")
    assert torch.equal(adapters.apply(other, tmp_path / "adapter")[name], right[name])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_dora": True, "target_modules": ["q_proj"]}, "DoRA"),
        ({"layer_replication": [(0, 2), (1, 2)], "target_modules": ["q_proj"]}, "layer replication"),
        ({"init_lora_weights": "pissa", "target_modules": ["q_proj"]}, "'pissa'"),
        ({"init_lora_weights": "olora", "target_modules": ["q_proj"]}, "'olora'"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, "trainable tokens"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path / "base")
    model = peft.get_peft_model(load("llama", base).float(), peft.LoraConfig(r=2, **options))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=named):
        adapters.open_adapter(tmp_path / "adapter", base)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "IA3"),
        (lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10), "ADALORA"),
        (lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PREFIX_TUNING"),
    ],
)
def test_other_types_are_refused_by_name(config: Callable[[], Any], named: str, tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path / "base")
    peft.get_peft_model(load("llama", base).float(), config()).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=f"type {named}, expected LORA"):
        adapters.open_adapter(tmp_path / "adapter", base)


def test_a_converted_pissa_adapter_is_plain_lora(tmp_path: Path) -> None:
    base = base_folder("llama", tmp_path / "base")
    model = peft.get_peft_model(  # which decomposes in float32
        load("llama", base).float(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    )
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    torch.manual_seed(3)
    randomise(model, lambda name: "lora_B" in name)
    expected = outputs("llama", model)
    model.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    applied = adapters.open_adapter(tmp_path / "adapter", base)
    got = outputs("llama", load("llama", applied.save(tmp_path / "out")))
    torch.testing.assert_close(got, expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", ["wte", "lm_head"])
def test_a_tied_head_or_embedding_is_refused(target: str, tmp_path: Path) -> None:
    base = base_folder("gpt2", tmp_path / "base")
    trained("gpt2", {"r": 2, "target_modules": [target, "c_attn"]}, tmp_path / "adapter", base)
    with pytest.raises(CheckpointError, match=r"(?i)tied to the .*untie"):
        adapters.open_adapter(tmp_path / "adapter", base)


def test_a_base_without_the_prefix_of_its_class(tmp_path: Path) -> None:
    """GPT-2 on the hub is stored without `transformer.`."""
    base = base_folder("gpt2", tmp_path / "base")
    expected = trained("gpt2", CASES["conv1d"][1], tmp_path / "adapter", base)
    weights = load_file(base / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(short, base / "model.safetensors", metadata={"format": "pt"})
    applied = adapters.open_adapter(tmp_path / "adapter", base)
    got = outputs("gpt2", load("gpt2", applied.save(tmp_path / "out")))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


# -- extract


def finetuned(kind: str, base: Path, rank: int, everything: bool, folder: Path) -> Checkpoint:
    """A base with a random change, of that rank in the linear layers; of the other tensors too, if `everything`."""
    model = load(kind, base)
    torch.manual_seed(4)
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if type(module).__name__ in ("Linear", "Conv1D") and module is not getattr(model, "lm_head", None):
                change = torch.randn(weight.shape[0], rank).double() @ torch.randn(rank, weight.shape[1]).double()
                weight.add_(change / 8)
            if everything:
                for parameter in module.parameters(recurse=False):
                    if parameter is not weight or type(module).__name__ not in ("Linear", "Conv1D", "Embedding"):
                        parameter.add_(torch.randn_like(parameter) / 8)
    model.save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("everything", [False, True])
def test_an_extracted_adapter_loads_in_peft(kind: str, everything: bool, tmp_path: Path) -> None:
    base = base_folder(kind, tmp_path / "base")
    tuned = finetuned(kind, base, 3, everything, tmp_path / "tuned")
    adapter = adapters.extract_lora(tuned, open_checkpoint(base), 5, alpha=7, dtype=torch.float64, save_rest=everything)
    assert adapter.error < 1e-9
    assert not adapter.left_out
    folder = adapter.save(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(load(kind, base), folder).eval()
    expected = outputs(kind, load(kind, tmp_path / "tuned"))
    torch.testing.assert_close(outputs(kind, model), expected, rtol=1e-8, atol=1e-9)
    applied = adapters.open_adapter(folder)  # its config names the base
    for name in tuned:
        torch.testing.assert_close(applied[name], tuned[name], rtol=1e-8, atol=1e-9)
    merged = model.merge_and_unload()
    torch.testing.assert_close(outputs(kind, merged), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "linear", "other"),
    [
        # peft looks for modules whose name ends in "norm", and finds every input_layernorm too
        ("llama-body", "layers.0.self_attn.q_proj.weight", "norm.weight"),
        # whose bias does not change, but has to be in the file
        ("bert", "bert.encoder.layer.1.output.dense.weight", "bert.encoder.layer.0.output.LayerNorm.weight"),
    ],
)
def test_modules_saved_as_a_whole_have_all_that_peft_asks_for(
    kind: str, linear: str, other: str, tmp_path: Path
) -> None:
    base = base_folder(kind, tmp_path / "base")
    model = load(kind, base)
    torch.manual_seed(5)
    randomise(model, {linear, other}.__contains__)
    model.save_pretrained(tmp_path / "tuned")
    folders = [tmp_path / "tuned", base]
    adapter = adapters.extract_lora(*map(open_checkpoint, folders), 24, dtype=torch.float64, save_rest=True)
    loaded = peft.PeftModel.from_pretrained(load(kind, base), adapter.save(tmp_path / "adapter")).eval()
    torch.testing.assert_close(outputs(kind, loaded), outputs(kind, model.eval()), rtol=1e-8, atol=1e-9)
