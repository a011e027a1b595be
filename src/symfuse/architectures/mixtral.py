"""Mixtral: Mistral with experts in the place of the feed-forward, under names of their own in files."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.experts import EXPERTS, EXPERTS_READS, expert_axes, mixture

BLOCK = decoder.LAYER + "block_sparse_moe."
ROUTER = {decoder.MLP + "gate.weight": BLOCK + "gate.weight"}  # name in memory → in files


@architecture("mixtral", tied=False)
def mixtral(c: Config) -> Family:
    axes = decoder.axes(c) | expert_axes(c, c.intermediate_size)
    experts = {ROUTER.get(name, name): layout for name, layout in EXPERTS.items()}
    reads = EXPERTS_READS | {
        decoder.BEFORE_MLP: tuple(ROUTER.get(name, name) for name in EXPERTS_READS[decoder.BEFORE_MLP])
    }
    tensors = decoder.PROJECTIONS | experts | decoder.NORMS
    family = mixture(c, axes, tensors, reads, pieces=("w1", "w3", "w2"), at=BLOCK)
    return replace(family, legacy={".mlp.gate.weight": ".block_sparse_moe.gate.weight"})
