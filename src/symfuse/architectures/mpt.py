"""MPT: ALiBi, whose slopes belong to the index of a head; no biases; in some, queries, keys and values are clipped."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ALIBI, HEADS, OUTPUTS, READERS, block_axes, feed_forward, linear, norm
from symfuse.groups import Signed
from symfuse.spec import Axis

LAYER = "blocks.{l}."
QKV, OUT = LAYER + "attn.Wqkv", LAYER + "attn.out_proj"
UP, DOWN = LAYER + "ffn.up_proj", LAYER + "ffn.down_proj"


@architecture("mpt")
def mpt(c: Config) -> Family:
    axes = block_axes(c.n_layers, c.d_model, c.n_heads, 4 * c.d_model, "gelu")
    axes |= {"h": Axis(c.n_heads, why=ALIBI), "vocab": Axis(c.vocab_size), "labels": Axis(c.labels)}
    c.get("attn_config.softmax_scale")  # decides the function, and nothing here
    if c.get("attn_config.clip_qkv"):  # each entry at the same limits
        axes |= {name: Axis(axes[name].size, Signed(), ("l", "h")) for name in ("qk", "v")}
    return Family(
        axes=axes,
        prefix="transformer.",
        tensors={
            "wte.weight": "vocab residual",
            **norm(LAYER + "norm_1", bias=False),
            **linear(QKV, "(h qk + h qk* + h v)", bias=False),
            **linear(OUT, "residual", "(h v*)", bias=False),
            **norm(LAYER + "norm_2", bias=False),
            **feed_forward(UP, DOWN, bias=False),
            **norm("norm_f", bias=False),
        },
        heads=HEADS,
        tied={"lm_head.weight": "wte.weight"} if c.tied else {},
        outputs=OUTPUTS,
        reads={
            LAYER + "norm_1.weight": (QKV + ".weight",),
            LAYER + "norm_2.weight": (UP + ".weight",),
            "norm_f.weight": READERS,
        },
    )
