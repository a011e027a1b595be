"""Tiny models of every family: pairwise distinct sizes, random gains and biases, unsaturated, float64.

Symmetric sizes, gains of 1 and biases of 0 would hide errors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers

from symfuse.architectures.torch_encoder import build
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint

TEXT = {
    "vocab_size": 61,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 28,
    "max_position_embeddings": 37,
    "type_vocab_size": 3,
    "num_labels": 3,
}
GPT2 = {"vocab_size": 61, "n_embd": 20, "n_layer": 2, "n_head": 4, "n_inner": 28, "n_positions": 37, "num_labels": 3}


def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random weights of a size at which nothing saturates; gains about 1, everything else about 0."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            gain = p.ndim == 1 and name.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64) * 0.3 + (1.0 if gain else 0.0))
    return module.double().eval()


def hf(class_name: str, config: transformers.PreTrainedConfig, seed: int = 0) -> Checkpoint:
    config.architectures = [class_name]
    config._attn_implementation = "eager"
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    return open_checkpoint(randomise(getattr(transformers, class_name)(config), seed), name=class_name)


def encoder(seed: int = 0, **options: object) -> Checkpoint:
    config = {
        "model_type": "torch_transformer_encoder", "hidden_size": 20, "num_attention_heads": 4,
        "intermediate_size": 28, "num_hidden_layers": 2, **options,
    }  # fmt: skip
    return open_checkpoint(randomise(build(config), seed), config=config, name="TransformerEncoder")


def of(class_name: str, config_class: str, base: dict[str, object], **options: object) -> Callable[..., Checkpoint]:
    def make(seed: int = 0) -> Checkpoint:
        return hf(class_name, getattr(transformers, config_class)(**base, **options), seed)

    return make


# label → a function from a seed to a checkpoint. Every contract test runs over this table.
MODELS: dict[str, Callable[..., Checkpoint]] = {
    "torch-relu-post": lambda seed=0: encoder(seed),
    "torch-gelu-pre": lambda seed=0: encoder(seed, hidden_act="gelu", norm_first=True, final_norm=True),
    "bert": of("BertModel", "BertConfig", TEXT),
    "bert-mlm": of("BertForMaskedLM", "BertConfig", TEXT),
    "bert-mlm-untied": of("BertForMaskedLM", "BertConfig", TEXT, tie_word_embeddings=False),
    "bert-pretraining": of("BertForPreTraining", "BertConfig", TEXT),
    "bert-sequence": of("BertForSequenceClassification", "BertConfig", TEXT),
    "gpt2": of("GPT2Model", "GPT2Config", GPT2),
    "gpt2-lm": of("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2-sequence": of("GPT2ForSequenceClassification", "GPT2Config", GPT2),
}
