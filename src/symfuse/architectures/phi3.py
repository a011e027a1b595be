"""Phi-3 and Phi-4: queries, keys and values in one tensor, gate and up in another; part of a head may be turned."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import placed

FUSED = {
    decoder.ATTENTION + "qkv_proj.weight": "(kv q c f + kv c* f + kv v) residual*",
    decoder.ATTENTION + "o_proj.weight": "residual (kv q v*)",
    decoder.MLP + "gate_up_proj.weight": "(|ffn| + ffn) residual*",
    decoder.MLP + "down_proj.weight": "residual ffn*",
}
FUSED_READS = decoder.READS | {
    decoder.BEFORE_ATTENTION: (decoder.ATTENTION + "qkv_proj.weight",),
    decoder.BEFORE_MLP: (decoder.MLP + "gate_up_proj.weight",),
}


@architecture("phi3", tied=False)
def phi3(c: Config) -> Family:
    axes = decoder.axes(c, share=1.0) | decoder.gated(c)
    return decoder.family(
        c,
        axes,
        (placed(FUSED, decoder.PARTLY) if "p" in axes else FUSED) | decoder.NORMS,
        FUSED_READS,
    )
