"""Phi-3 and Phi-4: queries, keys and values in one tensor, gate and up in another; part of a head may be turned."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.decoder import (
    ATTENTION,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    EMBEDDING,
    MLP,
    NORMS,
    PARTLY,
    READS,
    decoder,
    decoder_axes,
    gated,
    placed,
)

FUSED = {
    ATTENTION + "qkv_proj.weight": "(kv q c f + kv c* f + kv v) residual*",
    ATTENTION + "o_proj.weight": "residual (kv q v*)",
    MLP + "gate_up_proj.weight": "(|ffn| + ffn) residual*",
    MLP + "down_proj.weight": "residual ffn*",
}
FUSED_READS = READS | {
    BEFORE_ATTENTION: (ATTENTION + "qkv_proj.weight",),
    BEFORE_MLP: (MLP + "gate_up_proj.weight",),
}


@architecture("phi3", tied=False)
def phi3(c: Config) -> Family:
    axes = decoder_axes(c, share=1.0) | gated(c.get("hidden_act", "silu"), c.intermediate_size)
    return decoder(c, axes, EMBEDDING | (placed(FUSED, PARTLY) if "p" in axes else FUSED) | NORMS, FUSED_READS)
