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
    biased_attention,
    decoder,
    decoder_axes,
    gated,
    placed,
    with_tensors,
)
from symfuse.groups import Permutation

# A gain of its own for each head, [heads, size].
NORMS_OF_EACH = {ATTENTION + "q_norm.weight": "(kv q) (f 2)", ATTENTION + "k_norm.weight": "kv (f 2)"}


@architecture("cohere")
def cohere(c: Config) -> Family:
    """Logits are scaled by a number, which commutes. LayerNorms of queries and keys mix all planes of a head in their
    mean: then nothing acts on a plane."""
    normed = c.get("use_qk_norm", False)
    axes = decoder_axes(c, plane=None if normed else ROTARY, residual=Permutation())
    axes |= gated(c.get("hidden_act", "silu"), c.intermediate_size)
    norms = {name: layout for name, layout in NORMS.items() if name != BEFORE_MLP}
    family = decoder(c, axes, EMBEDDING | PROJECTIONS | GATED | norms, PARALLEL_READS, "layer")
    if c.get("attention_bias", False):
        family = biased_attention(family)
    family = with_tensors(family, placed(family.tensors, NEIGHBOURS))
    return with_tensors(family, NORMS_OF_EACH) if normed else family
