"""Qwen's mixtures of experts: some layers may have an ordinary feed-forward; in Qwen2's every token passes through a
shared expert too, as far as a gate of its own lets it."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.experts import EXPERTS, dense_layers, expert_axes, mixture, shared_block
from symfuse.errors import SpecError
from symfuse.groups import Sign

GATE = {decoder.MLP + "shared_expert_gate.weight": "1 residual*"}


@architecture("qwen2_moe", tied=False)
def qwen2_moe(c: Config) -> Family:
    shared, block = shared_block("shared_expert", c.shared_expert_intermediate_size)
    axes = decoder.axes(c) | expert_axes(c, c.moe_intermediate_size) | shared
    rest = decoder.PROJECTIONS | decoder.NORMS
    family = mixture(c, axes, rest, EXPERTS | block | GATE, dense=unrouted_layers(c))
    return family.plus(tensors=decoder.BIASES) if c.get("qkv_bias", True) else family


@architecture("qwen3_moe", "qwen3_vl_moe_text", tied=False)
def qwen3_moe(c: Config) -> Family:
    return _qwen3(c, unrouted_layers(c))


@architecture("mellum", tied=False)
def mellum(c: Config) -> Family:
    return _qwen3(c, dense_layers(c, ()), size=128)


def _qwen3(c: Config, dense: set[int], size: int | None = None) -> Family:
    axes = decoder.axes(c, plane=Sign(), size=size) | expert_axes(c, c.moe_intermediate_size)
    rest = decoder.PROJECTIONS | decoder.NORMS_OF_HEADS | decoder.NORMS
    family = mixture(c, axes, rest, dense=dense, question="transformer.")
    return decoder.biased(family, c.get("attention_bias", False))


def unrouted_layers(c: Config) -> set[int]:
    """The layers without experts: those that are named, and all but each `decoder_sparse_step`-th."""
    layers, step = c.num_hidden_layers, c.size("decoder_sparse_step", 1)
    named = c.entries("mlp_only_layers", int)
    if unknown := [layer for layer in named if layer not in range(layers)]:
        raise SpecError(f"config.json: mlp_only_layers names {unknown[0]!r}, and there are layers 0 to {layers - 1}")
    return {layer for layer in range(layers) if layer in named or (layer + 1) % step}
