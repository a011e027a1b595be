"""Longformer: RoBERTa with windows of attention, and maps of their own for tokens that attend to all others."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.bert import NAMES, SELF
from symfuse.architectures.blocks import attention, key_shift
from symfuse.architectures.roberta import roberta

# Values of both kinds are read by one output, so that they move alike.
GLOBAL = {letter: f"{name}_global" for letter, name in NAMES.items()}


@architecture("longformer")
def longformer(c: Config) -> Family:
    """A value's bias is not free: that of the other kind, which the output reads too, would have to follow."""
    family = roberta(c)
    maps = {n: text.replace("qk", "global_qk") for n, text in attention(GLOBAL).items() if SELF in n}
    others = {
        r.replace(".weight", "_global.weight"): gain for r, gain in family.gauges.items() if "attention.self" in r
    }
    return replace(
        family,
        prefix="longformer.",
        shifts=(key_shift(NAMES["k"]), key_shift(GLOBAL["k"], "global_qk")),
    ).plus(axes={"global_qk": family.axes["qk"]}, tensors=maps, gauges=others)
