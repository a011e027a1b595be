"""Cohere (Command R): both blocks side by side behind one LayerNorm without a bias; planes of neighbours."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY, placed
from symfuse.groups import Permutation

NORMS_OF_EACH = {"q": "kv q", "k": "kv"}  # a gain of its own for each head, [heads, size]


@architecture("cohere", float32=("CohereLayerNorm",))
def cohere(c: Config) -> Family:
    """Logits are scaled by a number, which commutes."""
    normed = c.get("use_qk_norm", False)
    axes = decoder.axes(c, plane=None if normed else ROTARY, residual=Permutation())
    axes |= decoder.gated(c)
    norms = {name: layout for name, layout in decoder.NORMS.items() if name != decoder.BEFORE_MLP}
    family = decoder.family(c, axes, decoder.PROJECTIONS | decoder.GATED | norms, decoder.PARALLEL_READS, "layer")
    family = decoder.biased(family, c.get("attention_bias", False))
    if not normed:
        return family.plus(tensors=placed(family.tensors, decoder.NEIGHBOURS))
    gains = {
        decoder.ATTENTION + f"{one}_norm.weight": f"({heads}) {axes['qk'].size}" for one, heads in NORMS_OF_EACH.items()
    }
    return family.plus(tensors=placed(family.tensors, decoder.WHOLE) | gains)
