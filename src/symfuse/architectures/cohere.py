"""Cohere (Command R): both blocks side by side behind one LayerNorm without a bias; planes of neighbours."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY
from symfuse.architectures.decoder import (
    ATTENTION,
    BEFORE_MLP,
    EMBEDDING,
    GATED,
    NEIGHBOURS,
    NORMS,
    PARALLEL_READS,
    PROJECTIONS,
    WHOLE,
    biased_attention,
    decoder,
    decoder_axes,
    gated,
    placed,
    with_tensors,
)
from symfuse.groups import Permutation

NORMS_OF_EACH = {"q": "kv q", "k": "kv"}  # a gain of its own for each head, [heads, size]


@architecture("cohere")
def cohere(c: Config) -> Family:
    """Logits are scaled by a number, which commutes."""
    normed = c.get("use_qk_norm", False)
    axes = decoder_axes(c, plane=None if normed else ROTARY, residual=Permutation())
    axes |= gated(c.get("hidden_act", "silu"), c.intermediate_size)
    norms = {name: layout for name, layout in NORMS.items() if name != BEFORE_MLP}
    family = decoder(c, axes, EMBEDDING | PROJECTIONS | GATED | norms, PARALLEL_READS, "layer")
    if c.get("attention_bias", False):
        family = biased_attention(family)
    if not normed:
        return with_tensors(family, placed(family.tensors, NEIGHBOURS))
    gains = {ATTENTION + f"{one}_norm.weight": f"({heads}) {axes['qk'].size}" for one, heads in NORMS_OF_EACH.items()}
    return with_tensors(family, placed(family.tensors, WHOLE) | gains)
