"""XGLM: sines of positions, which are computed: they are added to the stream, so that it stays; biases everywhere."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import HEADS, OUTPUTS, block_axes, feed_forward, norms, projections
from symfuse.architectures.marian import SINES
from symfuse.spec import Axis

LAYER = "layers.{l}."
NAMES = projections(LAYER + "self_attn.", "q_proj", "k_proj", "v_proj", "out_proj")
NORMS = (LAYER + "self_attn_layer_norm", LAYER + "final_layer_norm", "layer_norm")


@architecture("xglm")
def xglm(c: Config) -> Family:
    c.refuse("add_cross_attention", "its layers attend to an encoder too")
    axes = block_axes(c.num_layers, c.d_model, c.attention_heads, c.ffn_dim, c.get("activation_function", "gelu"))
    return Family(
        axes=axes | {"residual": Axis(c.d_model, why=SINES), "vocab": Axis(c.vocab_size)},
        prefix="model.",
        tensors={
            "embed_tokens.weight": "vocab residual",
            **NAMES.tensors(),
            **feed_forward(LAYER + "fc1", LAYER + "fc2"),
            **norms(*NORMS),
        },
        heads={"causal LM": HEADS["causal LM"]},
        tied={"lm_head.weight": "embed_tokens.weight"} if c.tied else {},
        buffers=("*embed_positions.weights",),
        shifts=NAMES.shifts(),
        outputs=OUTPUTS,
    )
