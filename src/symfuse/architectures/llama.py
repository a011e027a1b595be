"""Llama and what has its form: Mistral, SmolLM, Yi, Granite, SmolLM3, Qwen2 and Qwen3."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY
from symfuse.architectures.decoder import (
    BIASES,
    EMBEDDING,
    GATED,
    MLP_BIASES,
    NORMS,
    NORMS_OF_HEADS,
    PROJECTIONS,
    biased_attention,
    decoder,
    decoder_axes,
    gated,
    with_tensors,
)
from symfuse.groups import Group, Sign


def _family(c: Config, plane: Group = ROTARY) -> Family:
    axes = decoder_axes(c, plane=plane) | gated(c.get("hidden_act", "silu"), c.intermediate_size)
    return decoder(c, axes, EMBEDDING | PROJECTIONS | GATED | NORMS)


@architecture("smollm3")
@architecture("llama", "granite", tied=False)
def llama(c: Config) -> Family:
    """What Granite multiplies by numbers commutes with all of it. Layers of SmolLM3 without positions allow more than
    their planes; they are moved as the others are."""
    family = _family(c)
    if c.get("attention_bias", False):
        family = biased_attention(family)
    return with_tensors(family, MLP_BIASES) if c.get("mlp_bias", False) else family


@architecture("mistral", tied=False)
def mistral(c: Config) -> Family:
    return _family(c)


@architecture("qwen2", tied=False)
def qwen2(c: Config) -> Family:
    return with_tensors(_family(c), BIASES)


@architecture("qwen3", tied=False)
def qwen3(c: Config) -> Family:
    family = with_tensors(_family(c, Sign()), NORMS_OF_HEADS)
    return biased_attention(family) if c.get("attention_bias", False) else family
