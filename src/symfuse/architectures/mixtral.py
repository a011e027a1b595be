"""Mixtral: Mistral with experts in the place of the feed-forward, under names of their own in files."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture

BLOCK = decoder.LAYER + "block_sparse_moe."
ROUTER = {decoder.MLP + "gate.weight": BLOCK + "gate.weight"}  # name in memory → in files


@architecture("mixtral", tied=False)
def mixtral(c: Config) -> Family:
    axes = decoder.axes(c) | decoder.expert_axes(c, c.intermediate_size)
    experts = {ROUTER.get(name, name): layout for name, layout in decoder.EXPERTS.items()}
    reads = decoder.EXPERTS_READS | {
        decoder.BEFORE_MLP: tuple(ROUTER.get(name, name) for name in decoder.EXPERTS_READS[decoder.BEFORE_MLP])
    }
    tensors = decoder.PROJECTIONS | experts | decoder.NORMS
    family = decoder.mixture(c, axes, tensors, reads, pieces=("w1", "w3", "w2"), at=BLOCK)
    return replace(family, legacy={".mlp.gate.weight": ".block_sparse_moe.gate.weight"})
