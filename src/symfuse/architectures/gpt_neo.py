"""GPT-Neo: learned positions, projections without biases but for that of the output, windows in some layers."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import (
    HEADS,
    OUTPUTS,
    READERS,
    attention,
    block_axes,
    linear,
    norm,
    projections,
    readers,
)
from symfuse.spec import Axis

LAYER = "h.{l}."
NAMES = projections(LAYER + "attn.attention.", "q_proj", "k_proj", "v_proj", "out_proj")


@architecture("gpt_neo")
def gpt_neo(c: Config) -> Family:
    ffn, act = c.get("intermediate_size", 4 * c.hidden_size), c.get("activation_function", "gelu_new")
    axes = block_axes(c.num_layers, c.hidden_size, c.num_heads, ffn, act)
    return Family(
        axes=axes
        | {"vocab": Axis(c.vocab_size), "positions": Axis(c.max_position_embeddings), "labels": Axis(c.labels)},
        prefix="transformer.",
        tensors={
            "wte.weight": "vocab residual",
            "wpe.weight": "positions residual",
            **norm(LAYER + "ln_1"),
            **attention(NAMES, bias="o"),
            **norm(LAYER + "ln_2"),
            **linear(LAYER + "mlp.c_fc", "ffn"),
            **linear(LAYER + "mlp.c_proj", "residual", "ffn*"),
            **norm("ln_f"),
        },
        heads=HEADS,
        tied={"lm_head.weight": "wte.weight"} if c.tied else {},
        buffers=("*.attention.bias", "*.attention.masked_bias"),
        outputs=OUTPUTS,
        reads={
            LAYER + "ln_1.weight": readers(NAMES),
            LAYER + "ln_2.weight": (LAYER + "mlp.c_fc.weight",),
            "ln_f.weight": READERS,
        },
    )
