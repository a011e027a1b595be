"""Mixtral: Mistral with experts in the place of the feed-forward, under names of their own in files."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.decoder import BEFORE_MLP, EMBEDDING, LAYER, MLP, NORMS, PROJECTIONS, decoder_axes
from symfuse.architectures.experts import EXPERTS, EXPERTS_READS, expert_axes, mixture

BLOCK = LAYER + "block_sparse_moe."
ROUTER = {MLP + "gate.weight": BLOCK + "gate.weight"}  # name in memory → in files


@architecture("mixtral", tied=False)
def mixtral(c: Config) -> Family:
    axes = decoder_axes(c) | expert_axes(c, c.intermediate_size)
    experts = {ROUTER.get(name, name): layout for name, layout in EXPERTS.items()}
    reads = EXPERTS_READS | {BEFORE_MLP: tuple(ROUTER.get(name, name) for name in EXPERTS_READS[BEFORE_MLP])}
    tensors = EMBEDDING | PROJECTIONS | experts | NORMS
    family = mixture(c, axes, tensors, reads, pieces=("w1", "w3", "w2"), at=BLOCK)
    return replace(family, legacy={".mlp.gate.weight": ".block_sparse_moe.gate.weight"})
