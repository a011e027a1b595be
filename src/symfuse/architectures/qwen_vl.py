"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: an encoder of patches in time, height and width, and a merger of these.

The merger reads neighbouring patches side by side: the stream stands there as often as there are patches, one after the
other, and one element acts on all of them. What it puts out is written to the stream of the text.
"""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import (
    block_axes,
    feed_forward,
    linear,
    neurons,
    norm,
    placed,
    turned,
)
from symfuse.architectures.multimodal import joined
from symfuse.groups import Orthogonal, Signed, SignedMonomial
from symfuse.spec import Axis, Shift

LAYER, MERGER, DEEP = "blocks.{l}.", "merger.", "deepstack_merger_list.{deep}."
QKV, PROJ = LAYER + "attn.qkv", LAYER + "attn.proj"
FUSED = "(h c f + h c* f + h v)"
SHIFTS = (Shift(QKV + ".bias", "v", PROJ + ".weight", PROJ + ".bias"),)
ENCODER = {
    "patch_embed.proj.weight": "residual channels time height width",
    QKV + ".weight": f"{FUSED} residual*",
    QKV + ".bias": FUSED,
    **linear(PROJ, "residual", "(h v*)"),
}
GATED = {**linear(LAYER + "mlp.gate_proj", "|ffn|"), **feed_forward(LAYER + "mlp.up_proj", LAYER + "mlp.down_proj")}
AT = ("language_model.", "visual.")


def _encoder(c: Config, hidden: int, ffn: int, act: str) -> Family:
    """With LayerNorms, and without feed-forwards and merger."""
    patch = c.pair("patch_size", 14)
    axes = block_axes(c.depth, hidden, c.num_heads, ffn, c.get("hidden_act", act))
    images = {
        "channels": c.size("in_channels", 3), "time": c.pair("temporal_patch_size", 2)[0], "height": patch[0],
        "width": patch[1], "patches": c.size("spatial_merge_size", 2) ** 2,
    }  # fmt: skip
    axes |= {name: Axis(size) for name, size in images.items()}
    return Family(
        axes=turned(axes),
        tensors=ENCODER | norm(LAYER + "norm1") | norm(LAYER + "norm2"),
        outputs={"last_hidden_state": "residual", "pooler_output": "projection"},
        shifts=SHIFTS,
    )


def _merged(family: Family, first: str, last: str, out: int, at: str = MERGER, ffn: str = "merger_ffn") -> Family:
    """With a merger there, of those maps with neurons between them, as many as what the first one reads."""
    per = ("deep",) if at == DEEP else ()
    size = family.axes["patches"].size * family.axes["residual"].size
    maps = linear(at + first, ffn, "(patches residual*)") | linear(at + last, "projection", ffn + "*")
    return family.plus(
        axes={ffn: Axis(size, neurons("gelu"), per), "projection": Axis(out, Orthogonal())}, tensors=maps
    )


@architecture("qwen2_vl_vision")
def qwen2_vl_vision(c: Config) -> Family:
    family = _encoder(c, c.embed_dim, int(c.embed_dim * c.get("mlp_ratio", 4)), "quick_gelu")
    block = feed_forward(LAYER + "mlp.fc1", LAYER + "mlp.fc2")
    return _merged(family.plus(tensors=block | norm(MERGER + "ln_q")), "mlp.0", "mlp.2", c.hidden_size)


@architecture("qwen2_5_vl_vision")
def qwen2_5_vl_vision(c: Config) -> Family:
    """With RMSNorms and gated neurons; in most layers patches see those of their window."""
    family = _encoder(c, c.hidden_size, c.intermediate_size, "silu")
    norms = {LAYER + "norm1.weight": "|residual|", LAYER + "norm2.weight": "|residual|"}
    axes = {"ffn": Axis(c.intermediate_size, SignedMonomial(), ("l",)), "residual": Axis(c.hidden_size, Signed())}
    reads = {
        LAYER + "norm1.weight": (QKV + ".weight",),
        LAYER + "norm2.weight": (LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
        MERGER + "ln_q.weight": (MERGER + "mlp.0.weight",),
    }
    tensors = ENCODER | GATED | norms | {MERGER + "ln_q.weight": "|residual|"}
    family = replace(family.plus(axes=axes, reads=reads), tensors=tensors, norm="rms")
    return _merged(family, "mlp.0", "mlp.2", c.out_hidden_size)


@architecture("qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision")
def qwen3_vl_vision(c: Config) -> Family:
    """What some layers put out is merged too (but in Qwen3.5), and added to what the first layers of text put out."""
    family = _encoder(c, c.hidden_size, c.intermediate_size, "gelu_pytorch_tanh")
    tensors = {
        "patch_embed.proj.bias": "residual",
        "pos_embed.weight": "positions residual",
        **feed_forward(LAYER + "mlp.linear_fc1", LAYER + "mlp.linear_fc2"),
        **norm(MERGER + "norm"),
        DEEP + "norm.weight": "(patches |residual|)",
        DEEP + "norm.bias": "(patches residual)",
    }
    axes = {"positions": Axis(c.num_position_embeddings), "deep": Axis(len(c.get("deepstack_visual_indexes", [])))}
    family = _merged(family.plus(axes=axes, tensors=tensors), "linear_fc1", "linear_fc2", c.out_hidden_size)
    return _merged(family, "linear_fc1", "linear_fc2", c.out_hidden_size, DEEP, "deep_ffn")


@joined("qwen3_5_moe", text="qwen3_5_moe_text", vision="qwen3_5_moe_vision", at=AT, tied=False)
@joined("qwen3_5", text="qwen3_5_text", vision="qwen3_5_vision", at=AT, tied=False)
@joined("qwen3_vl_moe", text="qwen3_vl_moe_text", vision="qwen3_vl_moe_vision", at=AT, tied=False)
@joined("qwen3_vl", text="qwen3_vl_text", vision="qwen3_vl_vision", at=AT, tied=False)
@joined("qwen2_5_vl", text="qwen2_5_vl_text", vision="qwen2_5_vl_vision", at=AT, tied=False)
@joined("qwen2_vl", text="qwen2_vl_text", vision="qwen2_vl_vision", at=AT, tied=False)
def qwen_vl(_c: Config, both: Family) -> Family:
    axes = {name: axis for name, axis in both.axes.items() if name != "vision_projection"}
    return replace(both, axes=axes, tensors=placed(both.tensors, {"vision_projection": "residual"}))
