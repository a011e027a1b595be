"""OLMo 1: Llama's blocks with LayerNorms that have no parameters; in some, queries, keys and values are clipped. OLMo 2
and 3: norms behind each block and none before; queries and keys are normalised over all heads together. OLMoE and
FlexOlmo: the same with a mixture of experts in each layer; OLMoE's norms are before each block."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY
from symfuse.architectures.experts import expert_axes, mixture
from symfuse.groups import Centred, Sign, Signed
from symfuse.spec import Axis

CLIPPED = "clipped at the same limits on both sides: signs and order only"


@architecture("olmo", tied=False)
def olmo(c: Config) -> Family:
    """Its norms have nothing to fold: the stream may be rotated as it is. Values that are clipped at the same limits on
    both sides may be reordered and flipped; of a plane of queries and keys the sign is taken (quarter turns too would
    be exact), and no bias moves past the clip."""
    clipped = c.get("clip_qkv") is not None
    axes = decoder.axes(c, plane=Sign() if clipped else ROTARY, residual=Centred())
    if clipped:
        axes |= {axis: replace(axes[axis], why=CLIPPED) for axis in ("c", "v")}
        axes["v"] = replace(axes["v"], group=Signed())
    axes |= decoder.gated(c)
    family = decoder.family(c, axes, decoder.PROJECTIONS | decoder.GATED, reads={}, norm="layer")
    family = decoder.biased(family, c.get("attention_bias", False))
    return replace(family, shifts=()) if clipped else family


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


@architecture("olmoe", tied=False)
def olmoe(c: Config) -> Family:
    axes = decoder.axes(c, plane=Sign()) | expert_axes(c, c.intermediate_size)
    clipped = c.get("clip_qkv") is not None  # each entry of the values too, at the same limits
    if clipped:
        axes |= {"v": Axis(axes["v"].size, Signed(), ("l", "kv"))}
    family = mixture(c, axes, decoder.PROJECTIONS | NORMS_OVER_HEADS | decoder.NORMS)
    family = decoder.biased(family, c.get("attention_bias", False))
    return replace(family, shifts=()) if clipped else family  # a value's bias is inside of what is clipped


@architecture("flex_olmo", tied=False)
def flex_olmo(c: Config) -> Family:
    axes = decoder.axes(c, plane=Sign()) | expert_axes(c, c.intermediate_size)
    family = replace(mixture(c, axes, decoder.PROJECTIONS | NORMS_OVER_HEADS | POST_NORMS), reads={})
    return decoder.biased(family, c.get("attention_bias", False))
