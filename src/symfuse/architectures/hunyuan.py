"""Hunyuan 1, whose queries and keys are normalised behind their positions, and its mixture of experts."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import renamed
from symfuse.architectures.experts import EXPERTS, expert_axes, mixture, shared_block
from symfuse.groups import Sign

NORMS = renamed(decoder.NORMS_OF_HEADS, {"q_norm": "query_layernorm", "k_norm": "key_layernorm"})


@architecture("hunyuan_v1_dense", tied=False)
def hunyuan(c: Config) -> Family:
    axes = decoder.axes(c, plane=Sign()) | decoder.gated(c)
    family = decoder.family(c, axes, decoder.PROJECTIONS | NORMS | decoder.GATED | decoder.NORMS)
    return decoder.biased(family, c.get("attention_bias", False))


@architecture("hunyuan_v1_moe", tied=False)
def hunyuan_moe(c: Config) -> Family:
    shared, block = shared_block("shared_mlp", c.intermediate_size)
    axes = decoder.axes(c, plane=Sign()) | expert_axes(c, c.intermediate_size, c.size("num_experts", 1)) | shared
    experts = renamed(EXPERTS, {"gate.weight": "gate.wg.weight"}) | block
    family = mixture(c, axes, decoder.PROJECTIONS | NORMS | decoder.NORMS, experts)
    return decoder.biased(family, c.get("attention_bias", False))
