"""OLMoE and FlexOlmo: a mixture of experts in each layer; queries and keys are normalised over all heads together, as
in OLMo 2, and the norms of FlexOlmo are behind each block."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.experts import expert_axes, mixture
from symfuse.architectures.olmo2 import NORMS_OVER_HEADS, POST_NORMS
from symfuse.groups import Sign, Signed
from symfuse.spec import Axis


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
