"""Qwen's mixtures of experts: some layers may have an ordinary feed-forward; in Qwen2's every token passes through a
shared expert too, as far as a gate of its own lets it."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY, placed
from symfuse.errors import SpecError
from symfuse.groups import Group, Sign, SignedMonomial
from symfuse.spec import Axis

DENSE = placed(decoder.GATED, {"ffn": "dense_ffn"})
SHARED = {
    decoder.MLP + "shared_expert.gate_proj.weight": "|shared_ffn| residual*",
    decoder.MLP + "shared_expert.up_proj.weight": "shared_ffn residual*",
    decoder.MLP + "shared_expert.down_proj.weight": "residual shared_ffn*",
    decoder.MLP + "shared_expert_gate.weight": "1 residual*",
}
SHARED_READERS = tuple(name for name, layout in SHARED.items() if layout.endswith("residual*"))


@architecture("qwen2_moe", tied=False)
def qwen2_moe(c: Config) -> Family:
    family = _family(c, SHARED, {"shared_ffn": Axis(c.shared_expert_intermediate_size, SignedMonomial(), per=("l",))})
    return family.plus(tensors=decoder.BIASES) if c.get("qkv_bias", True) else family


@architecture("qwen3_moe", tied=False)
def qwen3_moe(c: Config) -> Family:
    family = _family(c, {}, {}, Sign()).plus(tensors=decoder.NORMS_OF_HEADS)
    if c.class_name.endswith("ForQuestionAnswering"):
        family = replace(family, prefix="transformer.")
    return decoder.biased(family, c.get("attention_bias", False))


def _family(c: Config, shared: dict[str, str], more: dict[str, Axis], plane: Group = ROTARY) -> Family:
    axes = decoder.axes(c, plane=plane) | decoder.expert_axes(c, c.moe_intermediate_size) | more
    sparse = decoder.EXPERTS | shared
    tensors = decoder.PROJECTIONS | sparse | decoder.NORMS
    at = decoder.BEFORE_MLP
    reads = decoder.EXPERTS_READS | {at: decoder.EXPERTS_READS[at] + SHARED_READERS + decoder.READS[at]}
    if dense := _dense_layers(c):
        axes |= {"dense_ffn": Axis(c.intermediate_size, SignedMonomial(), per=("l",))}
        absent = {layer: sparse if layer in dense else DENSE for layer in range(c.num_hidden_layers)}
        tensors |= DENSE | {name.format(l=layer): "" for layer, names in absent.items() for name in names}
    return decoder.mixture(c, axes, tensors, reads)


def _dense_layers(c: Config) -> set[int]:
    """The layers without experts: those that are named, and all but each `decoder_sparse_step`-th."""
    layers, step = c.num_hidden_layers, c.size("decoder_sparse_step", 1)
    named = c.get("mlp_only_layers", [])
    if unknown := [layer for layer in named if layer not in range(layers)]:
        raise SpecError(f"config.json: mlp_only_layers names {unknown[0]!r}, and there are layers 0 to {layers - 1}")
    return {layer for layer in range(layers) if layer in named or (layer + 1) % step}
