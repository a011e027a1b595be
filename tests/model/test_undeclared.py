"""Families without a declaration: what is read off names, shapes and the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from recipes.llama import UNKNOWN
from symfuse.errors import IncompatibleError, SpecError, UnknownArchitectureError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model, require_same_shape
from symfuse.model.config import Difference, differences
from symfuse.model.undeclared import undeclared
from symfuse.spec import Axis

LLAMA: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 37, "pad_token_id": 0,
}  # fmt: skip


def tiny(class_name: str, options: dict[str, Any], seed: int = 0, name: str = "") -> Checkpoint:
    """A model of a class of `transformers`, with random weights everywhere, gains included."""
    torch.manual_seed(seed)
    cls = getattr(transformers, class_name)
    module = cls(cls.config_class(**options)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1))
    module.config.architectures = [class_name]
    return open_checkpoint(module, name=name or f"model{seed}")


def llama(seed: int = 0, **options: Any) -> Checkpoint:
    return tiny("LlamaForCausalLM", {**LLAMA, **options}, seed)


def changed(checkpoint: Checkpoint, tensors: dict[str, Tensor | None] | None = None, **config: Any) -> Checkpoint:
    """A checkpoint with other tensors and config fields; None takes one away."""
    both = {**dict(checkpoint), **(tensors or {})}
    fields = {key: value for key, value in {**checkpoint.config, **config}.items() if value is not None}
    kept = {name: tensor for name, tensor in both.items() if tensor is not None}
    return open_checkpoint(kept, config=fields, name=checkpoint.name)


def unknown(seed: int = 0, **options: Any) -> Checkpoint:
    """A Llama of a family without a declaration."""
    return changed(llama(seed, **options), model_type=UNKNOWN)


def of(checkpoint: Checkpoint) -> Model:
    return Model.of(checkpoint, undeclared=True)


def test_an_unknown_family_is_names_and_shapes() -> None:
    model = of(unknown())
    spec = model.spec
    assert spec.family == UNKNOWN
    assert not model.declared
    assert set(spec.tensors) == set(model.checkpoint)
    assert spec.axes == {"l": Axis(2), "vocab": Axis(64)}
    assert not spec.movable
    up = spec.tensors["model.layers.1.mlp.up_proj.weight"]
    assert (str(up.layout), up.index) == ("48 32", {"l": 1})
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert (str(spec.tensors[name].layout), spec.tensors[name].index) == ("vocab 32", {})
    assert model.notes == (
        f"symfuse has no declaration for {UNKNOWN!r}: merged by names and shapes, without alignment",
    )


def test_only_if_asked() -> None:
    with pytest.raises(UnknownArchitectureError):
        Model.of(unknown())


def test_known_families_keep_their_declaration() -> None:
    model = of(tiny("BertModel", {k: LLAMA[k] for k in LLAMA if "head_dim" not in k and "key_value" not in k}))
    assert model.declared
    assert model.spec.movable
    assert model.notes == ()


CLASSES = {
    "GPTNeoXForCausalLM": {"rotary_pct": 0.25},
    "MixtralForCausalLM": {"num_local_experts": 3},
    "Qwen2ForCausalLM": {},
    "MistralForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "FalconForCausalLM": {},
    "MambaForCausalLM": {"state_size": 4},
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "BartForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    },
    "Dinov2Model": {},
    "CLIPTextModel": {},
}  # fmt: skip


@pytest.mark.parametrize("class_name", CLASSES)
def test_models_of_many_families(class_name: str, tmp_path: Any) -> None:
    """All tensors of the file are declared; every tensor of a layer has its index, no other has one."""
    cls = getattr(transformers, class_name)
    options = {**LLAMA, **CLASSES[class_name]}
    fields = cls.config_class().to_dict()
    config = cls.config_class(**{key: value for key, value in options.items() if key in fields})
    config.architectures = [class_name]
    cls(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = Model(checkpoint, undeclared(checkpoint))  # though some of them are declared
    assert set(map(model.spec.file_name, model.spec.tensors)) | model.spec.buffers == set(model.checkpoint)
    assert model.spec.axes["l"].size == 2
    layers = {name: d.index["l"] for name, d in model.spec.tensors.items() if "l" in d.index}
    assert set(layers.values()) == {0, 1}
    for name in model.spec.tensors:
        inside = any(part in name for part in (".0.", ".1.")) and "relative_attention_bias" not in name  # serves all
        assert inside == (name in layers)
        if inside:
            assert f".{layers[name]}." in name
    shapes = {name: model.checkpoint.info(model.spec.file_name(name)).shape for name in model.spec.tensors}
    for name, declared in model.spec.tensors.items():
        assert declared.layout.shape(model.spec.sizes) == shapes[name]
    assert require_same_shape([model, model]) == ()


def test_bias_of_attention_is_no_mask() -> None:
    """A causal mask has four dimensions; a bias of the same name is a weight."""
    plain = tiny("GPTNeoXForCausalLM", {k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")})
    masks: dict[str, Tensor | None] = {}
    for layer in range(2):
        masks[f"gpt_neox.layers.{layer}.attention.bias"] = torch.ones(1, 1, 37, 37).tril() > 0
        masks[f"gpt_neox.layers.{layer}.attention.masked_bias"] = torch.tensor(-1e9)
    assert undeclared(changed(plain, masks)).buffers == masks.keys()
    name = "gpt_neox.layers.0.attention.bias"
    assert not undeclared(changed(plain, {name: torch.zeros(32)})).buffers


def test_layers_that_guess_ahead_are_not_counted() -> None:
    """The file has three layers, the config two and one that predicts the token after the next."""
    model = of(changed(unknown(num_hidden_layers=3), num_hidden_layers=2, num_nextn_predict_layers=1))
    assert model.spec.axes["l"].size == 2
    assert model.spec.tensors["model.layers.2.mlp.up_proj.weight"].index == {"next": 0}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"num_hidden_layers": 3}, r"model0: config\.json says 3 layers, and model\.layers\.\* has 2"),
        (
            {},
            {"vocab_size": 60},
            r"model\.embed_tokens\.weight has shape \(64, 32\), and config\.json says vocab_size 60",
        ),
    ],
)
def test_a_config_of_other_weights_is_refused(
    tensors: dict[str, Tensor | None], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        undeclared(changed(llama(), tensors, **config))


def test_a_layer_that_is_absent_is_named() -> None:
    whole = llama(num_hidden_layers=4)
    gone: dict[str, Tensor | None] = {name: None for name in whole if name.startswith("model.layers.1.")}
    with pytest.raises(SpecError, match=r"model0: no tensors of model\.layers\.1, and layers up to 3 are there"):
        undeclared(changed(whole, gone))


def test_depth_may_differ_where_layers_are_taken_singly() -> None:
    models = [of(llama()), of(llama(1, num_hidden_layers=3))]
    with pytest.raises(IncompatibleError, match="model0 and model1: the numbers of layers differ: 2 and 3"):
        require_same_shape(models)
    assert require_same_shape(models, layers=False) == ()


def test_differences_are_data() -> None:
    a, b = llama(), llama(1, rms_norm_eps=1e-2, attention_dropout=0.1)
    eps, dropout = differences(a, b)
    assert eps == Difference("rms_norm_eps", 1e-6, 1e-2, matters=True)
    assert dropout == Difference("attention_dropout", 0.0, 0.1, matters=False)
    assert str(eps) == "rms_norm_eps: 1e-06 and 0.01"
