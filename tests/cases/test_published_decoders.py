"""Decoders as they are published: every field of the real config.json but its sizes, in the spelling in which it stands
there; random elements of all of the group are exact on the class that it names."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import symfuse
from cases.moved import case_of
from contract.tiny import Case, randomise
from symfuse.alignment import random_alignment
from symfuse.errors import LayoutError, SpecError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.model.config import differences

# Pairwise distinct; six query heads that share two keys, or as the published config says.
SIZES = {"hidden_size": 36, "num_attention_heads": 6, "intermediate_size": 29, "num_hidden_layers": 2}
SMALL = SIZES | {"vocab_size": 61, "max_position_embeddings": 64}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = SMALL | {"num_key_value_heads": 2}

LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "use_cache": True, **GROUPED,
}  # fmt: skip
LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "initializer_range": 0.02, "model_type": "llama",
    "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True, **SMALL,
    "num_key_value_heads": 6,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "initializer_range": 0.02, "model_type": "mistral",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, **GROUPED,
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "max_window_layers": 24, "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, **GROUPED,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 10,
    "hidden_act": "silu", "initializer_range": 0.02, "max_window_layers": 28, "model_type": "qwen3",
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, **GROUPED,
}  # fmt: skip
GEMMA = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 10,
    "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "model_type": "gemma",
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0", "use_cache": True, **SMALL, "num_key_value_heads": 1,
}  # fmt: skip
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
    "head_dim": 10, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02, "model_type": "gemma2", "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "sliding_window": 20, "torch_dtype": "float32", "transformers_version": "4.42.4",
    "use_cache": True, **GROUPED,
}  # fmt: skip
GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 10,
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "model_type": "gemma3_text",
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 20, "sliding_window_pattern": 2, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": True, **SMALL, "num_key_value_heads": 1,
}  # fmt: skip
PHI_3 = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "embd_pdrop": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "model_type": "phi3",
    "original_max_position_embeddings": 64, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2", "use_cache": True, **SMALL, "num_key_value_heads": 6,
}  # fmt: skip
# With long positions: half of each head (six of ten), as Phi-4-mini's three quarters, in three planes.
PHI_4_MINI = PHI_3 | GROUPED | {
    "full_attn_mod": 1, "hidden_size": 60, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    "max_position_embeddings": 128, "partial_rotary_factor": 0.6, "sliding_window": 262144,
    "rope_scaling": {"long_factor": [1, 1.1, 1.4], "short_factor": [1.0, 1.2, 1.3], "type": "longrope"},
    "tie_word_embeddings": True, "transformers_version": "4.45.0",
}  # fmt: skip
PHI_3_128K = PHI_3 | {
    "rope_scaling": {"long_factor": [1, 1.1, 1.4], "short_factor": [1.0, 1.2, 1.3], "type": "longrope"},
    "max_position_embeddings": 128,
}  # fmt: skip
PHI_4 = PHI_3 | GROUPED | {"sliding_window": None, "rope_theta": 250000, "transformers_version": "4.47.0"}
OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "model_type": "olmo2", "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000,
    "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": False,
    **SMALL, "num_key_value_heads": 6,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.041666666666666664, "is_llama_config": True, "mlp_bias": False, "model_type": "llama",
    "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
    **GROUPED,
}  # fmt: skip
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "layer_types": ["full_attention"] * 3, "max_window_layers": 28, "mlp_bias": False,
    "model_type": "smollm3", "no_rope_layer_interval": 3, "no_rope_layers": [1, 1, 0], "pretraining_tp": 2,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False, "use_sliding_window": False,
    **GROUPED, "num_hidden_layers": 3,
}  # fmt: skip
STABLELM_2 = {
    "architectures": ["StableLmForCausalLM"], "hidden_act": "silu", "initializer_range": 0.02, "layer_norm_eps": 1e-5,
    "model_type": "stablelm", "partial_rotary_factor": 0.25, "qk_layernorm": False, "rope_theta": 10000,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.38.0", "use_cache": True,
    "use_parallel_residual": False, "use_qkv_bias": True, **SMALL, "hidden_size": 96, "num_key_value_heads": 6,
}  # fmt: skip
STABLELM_2_12B = STABLELM_2 | {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "num_key_value_heads": 2, "qk_layernorm": True,
    "use_parallel_residual": True, "use_qkv_bias": False,
}  # fmt: skip
STARCODER2 = {
    "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.018042, "layer_norm_epsilon": 1e-5, "mlp_type": "default", "model_type": "starcoder2",
    "norm_epsilon": 1e-5, "norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096,
    "transformers_version": "4.37.0.dev0", "use_bias": True, "use_cache": True, **GROUPED,
}  # fmt: skip
COMMAND_R = {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "model_max_length": 131072,
    "model_type": "cohere", "rope_theta": 8000000.0, "torch_dtype": "float16", "transformers_version": "4.38.2",
    "use_cache": True, "use_qk_norm": False, **SMALL, "num_key_value_heads": 6,
}  # fmt: skip
COMMAND_R_PLUS = COMMAND_R | GROUPED | {"use_qk_norm": True, "logit_scale": 0.8333333333333334, "rope_theta": 75e6}
PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-5,
    "model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True, "use_parallel_residual": True,
    **SMALL, "hidden_size": 96,
}  # fmt: skip
GPT_J = {
    "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    "gradient_checkpointing": False, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "model_type": "gptj",
    "n_embd": 60, "n_head": 6, "n_inner": None, "n_layer": 2, "n_positions": 64, "resid_pdrop": 0.0, "rotary": True,
    "rotary_dim": 6, "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
    "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0",
    "use_cache": True, "vocab_size": 61,
}  # fmt: skip
FALCON_7B = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "bias": False, "hidden_dropout": 0.0, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
    "parallel_attn": True, "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": True,
    "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 2, "num_kv_heads": 6, "vocab_size": 61,
}  # fmt: skip
FALCON_40B = FALCON_7B | {"new_decoder_architecture": True, "num_kv_heads": 2}
FALCON_11B = FALCON_40B | {
    "activation": "gelu", "ff_factor": 4, "ffn_hidden_size": 29, "max_position_embeddings": 64,
    "num_ln_in_parallel_attn": 1, "rope_scaling": None, "rope_theta": 500042.0, "tie_word_embeddings": False,
}  # fmt: skip
FALCON_RW = FALCON_7B | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
OPT_350M = {
    "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
    "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "do_layer_norm_before": False, "dropout": 0.1,
    "ffn_dim": 29, "hidden_size": 36, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 64,
    "model_type": "opt", "num_attention_heads": 6, "num_hidden_layers": 2, "prefix": "</s>", "torch_dtype": "float16",
    "transformers_version": "4.20.0.dev0", "use_cache": True, "vocab_size": 61, "word_embed_proj_dim": 11,
}  # fmt: skip
OPT_125M = OPT_350M | {"do_layer_norm_before": True, "word_embed_proj_dim": 36}
BLOOM = {
    "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"], "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "hidden_dropout": 0.0, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5, "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 36, "n_inner": None,
    "n_layer": 2, "num_attention_heads": 6, "offset_alibi": 100, "pretraining_tp": 4, "seq_length": 2048,
    "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False, "transformers_version": "4.20.0",
    "unk_token_id": 0, "use_cache": True, "vocab_size": 61,
}  # fmt: skip
MPT = {
    "architectures": ["MptForCausalLM"],
    "attn_config": {
        "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
    },
    "d_model": 36, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4,
    "init_config": {"emb_init_std": None, "init_gain": 0, "name": "kaiming_normal_", "verbose": 0},
    "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 64, "model_type": "mpt",
    "n_heads": 6, "n_layers": 2, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16", "transformers_version": "4.28.1",
    "use_cache": False, "verbose": 0, "vocab_size": 61,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": LLAMA_2, "Llama-3.1-8B": LLAMA_31, "Mistral-7B-v0.1": MISTRAL, "Qwen2.5-0.5B": QWEN25,
    "Qwen3-0.6B": QWEN3, "gemma-2b": GEMMA, "gemma-2-2b": GEMMA_2, "gemma-3-1b": GEMMA_3, "Phi-3-mini-4k": PHI_3,
    "Phi-3-mini-128k": PHI_3_128K, "Phi-4-mini": PHI_4_MINI, "phi-4": PHI_4, "OLMo-2-7B": OLMO_2,
    "SmolLM2-135M": SMOLLM2, "SmolLM3-3B": SMOLLM3, "stablelm-2-1.6b": STABLELM_2, "stablelm-2-12b": STABLELM_2_12B,
    "starcoder2-3b": STARCODER2, "command-r": COMMAND_R, "command-r-plus": COMMAND_R_PLUS, "pythia-70m": PYTHIA,
    "gpt-j-6b": GPT_J, "falcon-7b": FALCON_7B, "falcon-40b": FALCON_40B, "falcon-11B": FALCON_11B,
    "falcon-rw-1b": FALCON_RW, "opt-350m": OPT_350M, "opt-125m": OPT_125M, "bloom-560m": BLOOM, "mpt-7b": MPT,
}  # fmt: skip


def published(name: str, seed: int = 0, **changed: Any) -> Checkpoint:
    """A random model of a published config, which is the config of the checkpoint as it stands."""
    config = PUBLISHED[name] | TOKENS | changed
    built = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))  # it changes what is inside
    built._attn_implementation = "eager"
    module = randomise(getattr(transformers, config["architectures"][0])(built), seed)
    return open_checkpoint(module, config=config, name=name)


def exactly_moved(this: Case) -> None:
    g = random_alignment(this.spec, 1, largest=True)
    assert {i.axis for i in g.elements} == {i.axis for i in this.spec.movable}
    assert this.error(g(this.checkpoint), g) < this.exact


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_of_its_group_is_exact(name: str) -> None:
    exactly_moved(case_of(published(name)))


# ---- What files have besides, or lack

FREQUENCIES = {
    "Llama-2-7b": "model.layers.{l}.self_attn.rotary_emb.inv_freq",
    "pythia-70m": "gpt_neox.layers.{l}.attention.rotary_emb.inv_freq",
    "falcon-7b": "transformer.h.{l}.self_attention.rotary.inv_freq",
    "falcon-40b": "transformer.h.{l}.self_attention.maybe_rotary.inv_freq",
    "stablelm-2-1.6b": "model.layers.{l}.self_attn.rotary_emb.cos_cached",
}
MASKS = {
    "pythia-70m": "gpt_neox.layers.{l}.attention.", "gpt-j-6b": "transformer.h.{l}.attn.",
}  # fmt: skip


@pytest.mark.parametrize("name", FREQUENCIES | MASKS)
def test_what_old_files_have_besides_is_dropped(name: str) -> None:
    checkpoint = published(name)
    besides = {}
    for layer in range(2):
        if name in FREQUENCIES:
            besides[FREQUENCIES[name].format(l=layer)] = torch.logspace(0, -3, 3)
        if name in MASKS:
            at = MASKS[name].format(l=layer)
            besides |= {at + "bias": torch.ones(1, 1, 8, 8).tril().bool(), at + "masked_bias": torch.tensor(-1e9)}
    model = Model.of(checkpoint.replace(tensors={**checkpoint, **besides}))
    assert model.spec.buffers == besides.keys()
    assert replace(model.spec, buffers=frozenset()) == Model.of(checkpoint).spec
    moved = random_alignment(model.spec, 1)(model.checkpoint)
    assert moved.keys() == checkpoint.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_without_the_prefix_of_the_base_model_are_the_same_tensors(name: str) -> None:
    checkpoint = published(name)
    prefix = next(iter(checkpoint)).partition(".")[0] + "."
    bare = checkpoint.replace(tensors={n.removeprefix(prefix): t for n, t in checkpoint.items()})
    ours, theirs = Model.of(bare).spec, Model.of(checkpoint).spec
    assert (ours.axes, ours.tensors, ours.tied) == (theirs.axes, theirs.tensors, theirs.tied)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "pythia-70m", "gpt-j-6b", "phi-4", "falcon-11B"])
def test_a_head_of_its_own_must_be_there(name: str) -> None:
    checkpoint = published(name)
    rest = {n: t for n, t in checkpoint.items() if not n.startswith(("lm_head", "embed_out"))}
    with pytest.raises(SpecError, match="would be initialised at random on loading"):
        Model.of(checkpoint.replace(tensors=rest))


@pytest.mark.parametrize(
    "name", ["Qwen2.5-0.5B", "gemma-2b", "command-r", "falcon-7b", "opt-350m", "bloom-560m", "mpt-7b"]
)
def test_a_tied_head_may_be_there_if_it_is_the_embedding(name: str) -> None:
    checkpoint = published(name)
    ends = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")
    table = next(t for n, t in checkpoint.items() if n.endswith(ends))
    both = checkpoint.replace(tensors={**checkpoint, "lm_head.weight": table.clone()})
    this = case_of(both)
    exactly_moved(this)
    other = both.replace(tensors={**both, "lm_head.weight": table + 1})
    with pytest.raises(SpecError, match="and the stored tensors differ"):
        symfuse.match(other, other)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("Llama-3.1-8B", {"num_key_value_heads": 4}, "6, is no multiple of num_key_value_heads, 4"),
        ("falcon-40b", {"num_kv_heads": 5}, "num_attention_heads, 6, is no multiple of num_kv_heads, 5"),
        ("Qwen3-0.6B", {"head_dim": 9}, "positions would turn 9 of the 9 dimensions of a head"),
        ("Qwen3-0.6B", {"head_dim": 8}, "the stored shape"),
        ("Qwen3-0.6B", {"head_dim": "ten"}, "head_dim is 'ten', expected an integer"),
        ("Phi-4-mini", {"partial_rotary_factor": 0.0}, "is 0.0, expected a number above 0, up to 1"),
        ("Phi-4-mini", {"partial_rotary_factor": 1.5}, "is 1.5, expected a number above 0, up to 1"),
        ("Phi-4-mini", {"partial_rotary_factor": 0.05}, "positions would turn 0 of the 10 dimensions of a head"),
        ("pythia-70m", {"rotary_pct": 0}, "is 0.0, expected a number above 0, up to 1"),
        ("gpt-j-6b", {"rotary_dim": 12}, "positions would turn 12 of the 10 dimensions of a head"),
        ("gpt-j-6b", {"rotary_dim": 0}, "rotary_dim is 0, expected a positive integer"),
        ("SmolLM3-3B", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries, expected one for each layer, 3"),
        ("SmolLM3-3B", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("Mistral-7B-v0.1", {"vocab_size": 62}, "embed_tokens.weight: the stored shape"),
        ("mpt-7b", {"expansion_ratio": 3, "d_model": 30}, "the stored shape"),
        ("stablelm-2-12b", {"qk_layernorm": False}, r"not declared: .*q_layernorm\.norms\.0\.weight"),
        ("command-r-plus", {"use_qk_norm": False}, r"not declared: .*k_norm\.weight"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_one_clear_error(name: str, fields: dict[str, Any], says: str) -> None:
    checkpoint = published(name)
    with pytest.raises((SpecError, LayoutError), match=says) as caught:
        Model.of(checkpoint.replace(config={**checkpoint.config, **fields}))
    assert name in str(caught.value)


def test_fields_that_follow_from_the_family_may_be_absent() -> None:
    """Heads of Gemma have 256 dimensions unless the config says otherwise, those of Qwen3 128."""
    for name, size in (("gemma-2b", 256), ("gemma-3-1b", 256), ("Qwen3-0.6B", 128)):
        checkpoint = published(name, head_dim=size)
        config = {key: value for key, value in checkpoint.config.items() if key != "head_dim"}
        assert Model.of(checkpoint.replace(config=config)).spec == Model.of(checkpoint).spec


@pytest.mark.parametrize("at", ["rope_scaling", "rope_parameters", None])
def test_the_share_of_a_head_that_is_turned_in_every_spelling(at: str | None) -> None:
    checkpoint = published("Phi-4-mini")
    config = {key: v for key, v in checkpoint.config.items() if key not in ("partial_rotary_factor", "rope_scaling")}
    scaling = dict(checkpoint.config["rope_scaling"])
    share = {"partial_rotary_factor": 0.6}
    config |= {"rope_scaling": scaling} | share if at is None else {at: scaling | share}
    assert Model.of(checkpoint.replace(config=config)).spec == Model.of(checkpoint).spec


def test_the_epsilon_of_olmo2_where_it_is_absent() -> None:
    """1e-5, as its class has it, and not Llama's."""
    checkpoint = published("OLMo-2-7B", rms_norm_eps=1e-5)
    absent = {key: value for key, value in checkpoint.config.items() if key != "rms_norm_eps"}
    assert differences(checkpoint, checkpoint.replace(config=absent)) == []
    assert differences(published("OLMo-2-7B"), checkpoint.replace(config=absent))[0].matters
