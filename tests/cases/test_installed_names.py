"""D08–D10: what the installed transformers calls a tensor in memory is known for folders, state dicts and adapters, in
and out; round trips with peft itself for every declared family."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from command import done
from contract.tiny import DECODER, MODELS, VISION, case, families, family, marked, model_of, real
from symfuse import adapters
from symfuse.architectures import ARCHITECTURES
from symfuse.errors import CheckpointError
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.verification import run

peft = pytest.importorskip("peft", reason="peft is not installed")

SPEECH: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 29,
    "conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
TOWER = VISION | {"image_size": 12, "patch_size": 4}
QWEN: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 29, "max_position_embeddings": 37, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip
GEMMA3 = DECODER | {"query_pre_attn_scalar": 13}
MAMBA = {"vocab_size": 61, "hidden_size": 20, "num_hidden_layers": 2, "state_size": 5, "time_step_rank": 3}
# Inside nn.MultiheadAttention: its weight is read, and the layer never called.
UNCALLED = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
# Of state space models, what peft refuses, and what their classes read without calling the layers.
UNADAPTED = dict.fromkeys(("mamba2", "falcon_h1", "nemotron_h"), ("out_proj",)) | {"jamba": ("dt_proj",)}
UNADAPTED |= dict.fromkeys(("mamba", "falcon_mamba"), ("out_proj", "dt_proj"))
OTHERS = ("torch-", "sceptr")  # of no class of transformers
# Classes of which peft finds no input embeddings; one whose attention reads weights of maps that it never calls; and
# one of whose adapters, with what is saved beside them, peft makes another model.
NOT_RUN = ("longcat", "data2vec-audio", "hubert", "unispeech", "wavlm", "wav2vec2-ctc")
# Dense layers beside experts, and experts that all tokens share, are taken for experts by peft.
BESIDE_EXPERTS = (
    *("qwen3-mixture-lm", "mellum-lm", "hunyuan-moe-lm", "solar-open-lm", "glm4-moe-lm", "glm4-moe-plain", "dots1-lm"),
    *("exaone-moe-lm", "latent-lm", "latent-halves", "latent-v2-lm", "latent-v2-lite", "glm4-lite-lm"),
    *("sarvam-mla-lm", "qwen3-next-lm", "qwen3-next-dense", "sparse-latent-lm", "afmoe-lm"),
    *("cohere2-mixture-lm", "cohere2-mixture-rms"),
)
# Their routers put out tuples, which peft's layer around a router cannot take.
TUPLES = ("llama4", "phimoe")
LABELS = [
    model
    for model in marked(MODELS)
    if not model.values[0].startswith(OTHERS + NOT_RUN + TUPLES)
    and ARCHITECTURES[family(model.values[0])].build is None
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        yield


def linear(module: torch.nn.Module) -> list[str]:
    """What peft can adapt of a module, but for its output head."""
    head = module.get_output_embeddings()
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    without = UNADAPTED.get(module.config.model_type, ())
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, kinds) and part is not head and type(part) is not UNCALLED and not name.endswith(without)
    ]


@torch.no_grad()
def perturb(module: torch.nn.Module, names: list[str]) -> None:
    """A difference of rank one in each of these layers."""
    torch.manual_seed(3)
    for name in names:
        weight: Any = module.get_submodule(name).weight
        weight.add_(torch.randn(len(weight), 1).double() @ torch.randn(1, weight.shape[1]).double() / 16)


@pytest.mark.parametrize("label", LABELS)
def test_d08_d09_round_trips_with_peft(label: str, tmp_path: Path) -> None:
    """The names of memory are read as those of files. Base and extracted adapter are the tuned model, as the class of
    peft for the task runs it. Base and an adapter that peft has saved are what peft merges."""
    base = case(label)
    whole = real(base.checkpoint)
    module: Any
    module, second = (copy.deepcopy(whole) for _ in range(2))  # its weights are those of the checkpoint
    _require_read_by_names_of_memory(module, label)

    perturb(module, linear(module))
    rest = label in BESIDE_EXPERTS
    adapter = adapters.extract_lora(open_checkpoint(module), base.checkpoint, 1, dtype=torch.float64, save_rest=rest)
    assert not adapter.left_out
    model = peft.PeftModel.from_pretrained(second, adapter.save(tmp_path / "a")).eval()
    expected, found = run(module, base.inputs), run(model, base.inputs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    assert any(not torch.allclose(base.outputs[name], value, rtol=1e-5, atol=1e-7) for name, value in expected.items())

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) / 4)
    model.save_pretrained(tmp_path / "b")
    applied = adapters.apply(base.checkpoint, tmp_path / "b")
    assert set(applied) == set(base.checkpoint)
    merged = open_checkpoint(model.merge_and_unload())
    for name, tensor in merged.items():
        torch.testing.assert_close(applied[name].to(tensor.dtype), tensor, rtol=1e-5, atol=1e-6)
    assert any(not torch.allclose(base.checkpoint[name].to(tensor.dtype), tensor) for name, tensor in merged.items())


@pytest.mark.parametrize("label", BESIDE_EXPERTS[:3])
def test_peft_takes_dense_layers_beside_experts_for_experts(label: str) -> None:
    """So extraction leaves them out, and says why: peft, asked for these layers alone, adapts others."""
    base = case(label)
    module = copy.deepcopy(real(base.checkpoint))
    dense = [name for name in linear(module) if name.endswith(("gate_proj", "up_proj"))]
    perturb(module, linear(module))
    adapter = adapters.extract_lora(open_checkpoint(module), base.checkpoint, 1, dtype=torch.float64)
    assert {f"{name}.weight" for name in dense} <= adapter.left_out.keys()
    assert {adapter.reasons[name].partition(";")[0] for name in adapter.left_out} == {
        "peft takes a layer of its name for an expert"
    }
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=1, target_modules=dense))
    layers = {
        name.partition(".lora_")[0].removeprefix("base_model.model.")
        for name in adapted.state_dict()
        if ".lora_" in name
    }
    assert layers
    assert layers.isdisjoint(dense)


def test_an_adapter_of_bare_parameters_is_refused_and_its_way_out_works(tmp_path: Path) -> None:
    """`target_parameters`: LoRA on the stacked experts of a layer, as peft writes it."""
    base = case("olmoe-lm")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(real(base.checkpoint)), config)
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"bare parameters.*\(target_parameters\).*merge_and_unload\(\)"):
        adapters.apply(base.checkpoint, tmp_path / "a")
    merged = open_checkpoint(model.merge_and_unload())
    assert merged.keys() == base.checkpoint.keys()
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert not torch.allclose(merged[name], base.checkpoint[name])


def _require_read_by_names_of_memory(module: torch.nn.Module, label: str) -> None:
    model = model_of(label)
    found = Model.of(open_checkpoint(module.state_dict(), config=model.checkpoint.config))
    assert model.spec.tensors.items() <= found.spec.tensors.items()  # and aliases
    for name in model.spec.tensors:
        tensor = found.read(name)  # biases of routers are float32 in memory, whatever the model's dtype
        torch.testing.assert_close(tensor, model.read(name).to(tensor.dtype), rtol=0, atol=0)


def test_round_trips_are_of_every_family() -> None:
    """But for those of which no class can be adapted. A family that symfuse builds itself has no names of
    `transformers`."""
    own = {name for name, family in ARCHITECTURES.items() if family.build is None} & set(transformers.CONFIG_MAPPING)
    tried = set().union(*(families(model.values[0]) for model in LABELS))
    assert (
        own - tried == set().union(*(families(label) for label in MODELS if label.startswith(NOT_RUN + TUPLES))) - tried
    )


def saved(class_name: str, config: Any, folder: Path, seed: int = 0) -> Any:
    """A random model of transformers, which it has saved there."""
    torch.manual_seed(seed)
    module = getattr(transformers, class_name)(config).double().eval()
    module.save_pretrained(folder)
    return module


def merged(folders: list[Path], out: Path, like: torch.nn.Module, *options: str) -> dict[str, torch.Tensor]:
    """The mean of models in folders, as the command line writes it and that class loads it, with no tensor missing."""
    done("merge", *map(str, folders), "-o", str(out), *options)
    loaded, info = type(like).from_pretrained(out, output_loading_info=True, dtype=torch.float64)
    assert not any(info.values()), info
    return dict(loaded.state_dict())


def in_memory(module: Any, folder: Path) -> Path:
    """A folder with the names that the class has in memory."""
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    module.config.save_pretrained(folder)
    return folder


def require_mean(found: dict[str, torch.Tensor], one: torch.nn.Module, two: torch.nn.Module) -> None:
    assert found.keys() == one.state_dict().keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (one.state_dict()[name] + two.state_dict()[name]) / 2)


@pytest.mark.parametrize(("kind", "config"), [("ViTMSNModel", "ViTMSNConfig"), ("ViTModel", "ViTConfig")])
def test_d08_folders_with_names_of_files_and_of_memory(kind: str, config: str, tmp_path: Path) -> None:
    """Of a family without a declaration, and of one with it."""
    one, two = (saved(kind, getattr(transformers, config)(**VISION), tmp_path / str(seed), seed) for seed in (0, 1))
    folders = [tmp_path / "0", in_memory(two, tmp_path / "memory")]
    assert set(open_checkpoint(folders[0])) != set(open_checkpoint(folders[1]))
    require_mean(merged(folders, tmp_path / "out", one), one, two)
    require_mean(merged(folders[::-1], tmp_path / "reversed", one), one, two)


@pytest.mark.parametrize("base", [0, 1])
def test_d06_old_and_new_weight_norm(base: int, tmp_path: Path) -> None:
    one, two = (saved("Wav2Vec2Model", transformers.Wav2Vec2Config(**SPEECH), tmp_path / str(s), s) for s in (0, 1))
    file = tmp_path / "1" / "model.safetensors"
    new = load_file(file)
    old = {
        name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): tensor
        for name, tensor in new.items()
    }
    assert len(new.keys() - old.keys()) == 2
    save_file(old, file, metadata={"format": "pt"})
    folders = [tmp_path / "0", tmp_path / "1"]
    found = merged(folders[:: 1 - 2 * base], tmp_path / "out", one, "--foreign", "drop")
    require_mean(found, one, two)


def test_d09_a_nested_language_model(tmp_path: Path) -> None:
    config = transformers.Gemma3Config(text_config=GEMMA3 | {"model_type": "gemma3_text"}, vision_config=TOWER)
    base = saved("Gemma3ForConditionalGeneration", config, tmp_path / "base")
    tuned = copy.deepcopy(base)
    perturb(tuned, [name for name in linear(base) if "language_model" in name])
    tuned.save_pretrained(tmp_path / "tuned")
    adapter = adapters.extract_lora(
        open_checkpoint(tmp_path / "tuned"), open_checkpoint(tmp_path / "base"), 1, dtype=torch.float64
    )
    assert not adapter.left_out
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), adapter.save(tmp_path / "extracted")).eval()
    ids = torch.arange(3, 10)[None]
    with torch.no_grad():
        expected = tuned(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(base(input_ids=ids).logits, expected, rtol=1e-3)
    applied = adapters.apply(open_checkpoint(tmp_path / "base"), tmp_path / "extracted")
    for name, tensor in open_checkpoint(tmp_path / "tuned").items():
        torch.testing.assert_close(applied[name], tensor, rtol=1e-5, atol=1e-6)


def test_d10_what_peft_refuses_is_left_out_and_said(tmp_path: Path) -> None:
    base = saved("MambaForCausalLM", transformers.MambaConfig(**MAMBA), tmp_path / "base")
    tuned = copy.deepcopy(base)
    without = UNADAPTED["mamba"]
    perturb(tuned, [*linear(base), *(name for name, _ in base.named_modules() if name.endswith(without))])
    adapter = adapters.extract_lora(open_checkpoint(tuned), open_checkpoint(tmp_path / "base"), 1, dtype=torch.float64)
    assert {name.split(".")[-2] for name in adapter.left_out} == {*without}
    for one in without:
        assert any(f"mixer.{one}.weight: left out" in line for line in adapter.report())
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), adapter.save(tmp_path / "a")).merge_and_unload()
    for name, tensor in tuned.state_dict().items():
        expected = base.state_dict()[name] if name.split(".")[-2] in without else tensor
        torch.testing.assert_close(loaded.state_dict()[name], expected, rtol=1e-5, atol=1e-6)


# What peft cannot hold as a whole, beside tensors of a model itself: heads and tables that are tied.
LEFT_OUT = {
    "electra-generator": {"electra.embeddings.word_embeddings.weight", "generator_lm_head.bias"},
    "modernbert-mlm": {"model.embeddings.tok_embeddings.weight", "decoder.bias"},
    "bart-lm": {"model.shared.weight"}, "marian-lm": {"model.shared.weight"}, "llama-lm": set(),
    "clip": {"logit_scale", "vision_model.embeddings.class_embedding"},
    "siglip": {
        "logit_scale", "logit_bias", "vision_model.head.probe",
        "vision_model.head.attention.in_proj_weight", "vision_model.head.attention.in_proj_bias",
    },
}  # fmt: skip


def tuned_everywhere(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(3)
    tuned = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn_like(parameter) / 16)
    return tuned


@pytest.mark.parametrize("label", LEFT_OUT)
def test_what_is_saved_as_a_whole_is_what_peft_runs(label: str, tmp_path: Path) -> None:
    """All that is not of low rank is saved, but for what peft cannot load, which is printed with the reason."""
    base = case(label)
    module: Any = real(base.checkpoint)
    tuned = open_checkpoint(tuned_everywhere(module))
    adapter = adapters.extract_lora(tuned, base.checkpoint, 3, dtype=torch.float64, save_rest=True)
    assert adapter.left_out.keys() == adapter.reasons.keys() == LEFT_OUT[label]
    assert sum("left out" in line and line.endswith(")") for line in adapter.report()) == len(LEFT_OUT[label])
    model = peft.PeftModel.from_pretrained(copy.deepcopy(module), adapter.save(tmp_path / "a")).eval()
    applied = adapters.apply(base.checkpoint, tmp_path / "a")
    expected, found = run(real(applied), base.inputs), run(model, base.inputs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8)
        assert not torch.allclose(base.outputs[name], value, rtol=1e-3, atol=1e-3)
    for name in adapter.saved:
        torch.testing.assert_close(applied[name], tuned[name], rtol=0, atol=0)


XLNET = {"vocab_size": 61, "d_model": 20, "n_layer": 1, "n_head": 4, "d_inner": 29}
DISTILBERT = {"vocab_size": 61, "dim": 20, "n_layers": 1, "n_heads": 4, "hidden_dim": 29}


@pytest.mark.parametrize(
    ("kind", "config", "left", "reason"),
    [
        ("DistilBertForMaskedLM", transformers.DistilBertConfig(**DISTILBERT), "vocab_projector.bias", "tied"),
        ("XLNetLMHeadModel", transformers.XLNetConfig(**XLNET), "lm_loss.bias", "tied"),
        (
            "Wav2Vec2ForCTC", transformers.Wav2Vec2Config(**SPEECH),
            "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original0", "kind",
        ),
    ],
)  # fmt: skip
def test_what_peft_cannot_save_is_left_out_with_the_reason(
    kind: str, config: Any, left: str, reason: str, tmp_path: Path
) -> None:
    base = saved(kind, config, tmp_path / "base")
    tuned = open_checkpoint(tuned_everywhere(base))
    adapter = adapters.extract_lora(tuned, open_checkpoint(tmp_path / "base"), 3, dtype=torch.float64, save_rest=True)
    assert reason in adapter.reasons[left]
    assert any("orm" in name for name in adapter.saved)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), adapter.save(tmp_path / "a")).merge_and_unload()
    for name in adapter.saved:
        torch.testing.assert_close(loaded.state_dict()[name], tuned[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("label", "task"),
    [
        ("whisper-lm", None), ("t5-lm", "SEQ_2_SEQ_LM"), ("llama-lm", "CAUSAL_LM"), ("bert-question", None),
        ("bert-sequence", "SEQ_CLS"), ("vit-classification", None),
    ],
)  # fmt: skip
def test_d10_the_task_is_none_or_one_that_peft_can_run(label: str, task: str | None) -> None:
    """That peft runs each is in the round trips."""
    module: Any = copy.deepcopy(real(case(label).checkpoint))
    perturb(module, linear(module))
    assert adapters.extract_lora(open_checkpoint(module), case(label).checkpoint, 1).config["task_type"] == task


@pytest.mark.parametrize("label", ["mixtral-lm", pytest.param("olmoe-lm", marks=pytest.mark.slow)])
def test_d09_experts_are_adapted_together(label: str, tmp_path: Path) -> None:
    """One expert of each layer has changed, and the router; the rank is more than the router has rows."""
    base = case(label)
    module: Any = copy.deepcopy(real(base.checkpoint))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight")):
                (parameter if parameter.dim() == 2 else parameter[3]).mul_(1.1)
    tuned, expected = open_checkpoint(module), run(module, base.inputs)
    adapter = adapters.extract_lora(tuned, base.checkpoint, 30, dtype=torch.float64)
    assert not adapter.left_out
    loaded = peft.PeftModel.from_pretrained(real(base.checkpoint), adapter.save(tmp_path / "a")).eval()
    for name, value in run(loaded, base.inputs).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(base.outputs[name], value, rtol=1e-3, atol=1e-3)
    applied = adapters.apply(base.checkpoint, tmp_path / "a")
    for name in tuned:
        torch.testing.assert_close(applied[name], tuned[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["Qwen2VL", pytest.param("Qwen2_5_VL", marks=pytest.mark.slow)])
@pytest.mark.parametrize("flat", [False, True])
def test_d51_a_vision_model_and_its_own_language_model(kind: str, flat: bool, tmp_path: Path) -> None:
    """flat: a config of older releases, with the language model's fields among its own."""
    vision = {"depth": 1, "num_heads": 2, "patch_size": 4, "hidden_size": 24 if kind == "Qwen2VL" else 16}
    vision |= {"embed_dim": 16, "mlp_ratio": 2} if kind == "Qwen2VL" else {"out_hidden_size": 24}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    inner = QWEN | {"rope_parameters": rope | {"mrope_section": [1, 1, 1]}}
    config = getattr(transformers, f"{kind}Config")(text_config=inner, vision_config=vision, image_token_id=5)
    both = saved(f"{kind}ForConditionalGeneration", config, tmp_path / "both")
    text = saved("Qwen2ForCausalLM", transformers.Qwen2Config(**QWEN, rope_parameters=rope), tmp_path / "text", 1)
    if flat:
        file = tmp_path / "both" / "config.json"
        own = json.loads(file.read_text())
        file.write_text(json.dumps({**own.pop("text_config"), **own}))
    folders = [tmp_path / "both", tmp_path / "text"]
    out = merged(folders, tmp_path / "wide", both)
    for name, tensor in both.state_dict().items():
        other = text.state_dict().get(name.replace("model.language_model.", "model."))
        assert (other is None) == ("visual" in name)
        torch.testing.assert_close(out[name], tensor if other is None else (tensor + other) / 2)
    out = merged(folders[::-1], tmp_path / "narrow", text)
    for name, tensor in text.state_dict().items():
        other = both.state_dict()[name.replace("model.", "model.language_model.")]
        torch.testing.assert_close(out[name], (tensor + other) / 2)
