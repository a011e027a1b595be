"""OLMo 2 and 3: norms behind each block and none before; queries and keys are normalised over all heads together."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.groups import Sign

# Their gains act on what is written to the stream, which is read as it is: no `reads`.
POST_NORMS = {
    decoder.LAYER + "post_attention_layernorm.weight": "|residual|",
    decoder.LAYER + "post_feedforward_layernorm.weight": "|residual|",
    "norm.weight": "|residual|",
}
# A gain of its own for each head: they move with the heads.
NORMS_OVER_HEADS = {decoder.ATTENTION + "q_norm.weight": "(kv q 2 f)", decoder.ATTENTION + "k_norm.weight": "(kv 2 f)"}


@architecture("olmo2", "olmo3", tied=False)
def olmo2(c: Config) -> Family:
    axes = decoder.axes(c, plane=Sign()) | decoder.gated(c)
    family = decoder.family(c, axes, decoder.PROJECTIONS | NORMS_OVER_HEADS | decoder.GATED | POST_NORMS, reads={})
    return decoder.biased(family, c.get("attention_bias", False))
