"""Gemma and VaultGemma, with gains stored less 1; Gemma 2 and the text model of Gemma 3, with norms behind each block
as well."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY, with_names
from symfuse.groups import Group, Sign

TANH = "gelu_pytorch_tanh"
# The gains of those behind a block act on what is written to the stream: there is nothing to fold them into that keeps
# their place, and no `reads`.
SANDWICH = {decoder.LAYER + f"{place}_feedforward_layernorm.weight": "|residual|" for place in ("pre", "post")}


def _family(c: Config, activation: str, plane: Group = ROTARY) -> Family:
    axes = decoder.axes(c, plane=plane, size=256) | decoder.gated(c, activation)
    family = decoder.family(c, axes, decoder.PROJECTIONS | decoder.GATED | decoder.NORMS, decoder.READS, "rms+1")
    return decoder.biased(family, c.get("attention_bias", False))


@architecture("gemma")
def gemma(c: Config) -> Family:
    """Its embeddings are scaled by a number, which commutes with all of it."""
    return _family(c, c.get("hidden_act", TANH))


@architecture("gemma2")
def gemma2(c: Config) -> Family:
    return _sandwich(_family(c, c.get("hidden_activation", TANH)))


@architecture("vaultgemma")
def vaultgemma(c: Config) -> Family:
    """Gemma 2 without the norms behind each block."""
    return with_names(_family(c, c.get("hidden_activation", TANH)), {"post_attention": "pre_feedforward"})


@architecture("gemma3_text")
def gemma3(c: Config) -> Family:
    return _sandwich(_family(c, c.get("hidden_activation", TANH), Sign())).plus(tensors=decoder.NORMS_OF_HEADS)


def _sandwich(family: Family) -> Family:
    return replace(family.plus(tensors=SANDWICH), reads={})
