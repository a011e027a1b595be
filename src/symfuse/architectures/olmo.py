"""OLMo 1: Llama's blocks with LayerNorms that have no parameters; in some, queries, keys and values are clipped."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY
from symfuse.groups import Centred, Sign, Signed

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
