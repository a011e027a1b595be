"""OLMo 2: norms behind each block and none before; queries and keys are normalised over all heads together."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.decoder import (
    ATTENTION,
    EMBEDDING,
    GATED,
    LAYER,
    PROJECTIONS,
    biased_attention,
    decoder,
    decoder_axes,
    gated,
)
from symfuse.groups import Sign

# Their gains act on what is written to the stream, which is read as it is: no `reads`.
POST_NORMS = {
    LAYER + "post_attention_layernorm.weight": "|residual|",
    LAYER + "post_feedforward_layernorm.weight": "|residual|",
    "norm.weight": "|residual|",
}
# A gain of its own for each head: they move with the heads.
NORMS_OVER_HEADS = {ATTENTION + "q_norm.weight": "(kv q 2 f)", ATTENTION + "k_norm.weight": "(kv 2 f)"}


@architecture("olmo2", tied=False)
def olmo2(c: Config) -> Family:
    axes = decoder_axes(c, plane=Sign()) | gated(c.get("hidden_act", "silu"), c.intermediate_size)
    family = decoder(c, axes, EMBEDDING | PROJECTIONS | NORMS_OVER_HEADS | GATED | POST_NORMS, reads={})
    return biased_attention(family) if c.get("attention_bias", False) else family
