"""Mixtral: Mistral with experts in the place of the feed-forward, under names of their own in files; PhiMoE with
LayerNorms, MiniMax M2 with queries and keys that are normalised over all heads."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.experts import EXPERTS, expert_axes, mixture
from symfuse.architectures.olmo import NORMS_OVER_HEADS
from symfuse.groups import Permutation, Sign, Signed
from symfuse.spec import Axis, NormKind

BLOCK = decoder.LAYER + "block_sparse_moe."
EXPERTS_IN_FILES = {BLOCK + "gate.weight": EXPERTS[decoder.MLP + "gate.weight"]}
EXPERTS_IN_FILES |= {name: layout for name, layout in EXPERTS.items() if "experts" in name}
OVER_HEADS_PARTLY = {"2 f": "(2 f + |p|)"}
MEMORY = {".mlp.gate.weight": ".block_sparse_moe.gate.weight"}  # name in memory → in files


def _family(c: Config, axes: dict[str, Axis], rest: dict[str, str], norm: NormKind = "rms") -> Family:
    axes = axes | expert_axes(c, c.intermediate_size)
    family = mixture(c, axes, rest, EXPERTS_IN_FILES, pieces=("w1", "w3", "w2"), at=BLOCK, norm=norm)
    return replace(family, legacy=MEMORY)


@architecture("mixtral", tied=False)
def mixtral(c: Config) -> Family:
    return _family(c, decoder.axes(c), decoder.PROJECTIONS | decoder.NORMS)


@architecture("phimoe", tied=False)
def phimoe(c: Config) -> Family:
    norms = decoder.NORMS | decoder.norm_biases(decoder.NORMS)
    family = _family(c, decoder.axes(c, residual=Permutation()), decoder.PROJECTIONS | norms, "layer")
    family = replace(family, legacy={".mlp.router.weight": ".block_sparse_moe.gate.weight"})
    family = decoder.biased(family, c.get("attention_bias", False))
    return decoder.with_head_bias(family) if c.get("lm_head_bias", False) else family


@architecture("minimax_m2", tied=False)
def minimax_m2(c: Config) -> Family:
    """Of what positions do not turn, units may be reordered and flipped: their gains follow."""
    share = c.get("rotary_dim", 0) / c.size("head_dim", 128)
    axes = decoder.axes(c, plane=Sign(), share=share or 1.0, size=128)
    if "p" in axes:
        axes |= {"p": replace(axes["p"], group=Signed())}
    rest = decoder.PROJECTIONS | NORMS_OVER_HEADS | decoder.NORMS
    family = _family(c, axes, rest).plus(tensors={BLOCK + "e_score_correction_bias": "e"})
    memory = MEMORY | {".mlp.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias"}
    return replace(decoder.partly(family, OVER_HEADS_PARTLY), legacy=memory)
