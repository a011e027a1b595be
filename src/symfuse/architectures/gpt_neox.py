"""GPT-NeoX and Pythia: queries, keys and values fused for each head, a part of each head rotary, and attention and
feed-forward on the same stream or one after the other."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import (
    HEADS,
    OUTPUTS,
    READERS,
    block_axes,
    feed_forward,
    linear,
    norm,
    turned,
    value_shift,
)
from symfuse.spec import Axis, Shift

LAYER = "layers.{l}."
QKV, DENSE = LAYER + "attention.query_key_value", LAYER + "attention.dense"
UP, DOWN = LAYER + "mlp.dense_h_to_4h", LAYER + "mlp.dense_4h_to_h"
HEAD = "embed_out.weight"


@architecture("gpt_neox", tied=False)
def gpt_neox(c: Config) -> Family:
    c.get("use_parallel_residual", True)  # decides the function, and nothing here
    act, bias = c.get("hidden_act", "gelu"), c.get("attention_bias", True)
    axes = block_axes(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act)
    axes = turned(axes, int(axes["qk"].size * c.rotary_share(0.25, before="rotary_pct")))
    axes |= {"vocab": Axis(c.vocab_size), "labels": Axis(c.labels)}
    fused = "(h (c f + p + c* f + p* + v))" if "p" in axes else "(h (c f + c* f + v))"
    return Family(
        axes=axes,
        prefix="gpt_neox.",
        tensors={
            "embed_in.weight": "vocab residual",
            **norm(LAYER + "input_layernorm"),
            **linear(QKV, fused, bias=bias),
            **linear(DENSE, "residual", "(h v*)", bias=bias),
            **norm(LAYER + "post_attention_layernorm"),
            **feed_forward(UP, DOWN),
            **norm("final_layer_norm"),
        },
        heads=HEADS | {"causal LM": Head(("ForCausalLM",), {HEAD: "vocab residual*"})},
        tied={HEAD: "embed_in.weight"} if c.tied else {},
        buffers=("*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq"),
        legacy={"lm_head.weight": HEAD},  # its name in memory
        # A key's bias is free where no position turns it.
        shifts=(*((Shift(QKV + ".bias", "p*"),) if "p" in axes else ()), value_shift(QKV, DENSE)) if bias else (),
        outputs=OUTPUTS,
        reads={
            LAYER + "input_layernorm.weight": (QKV + ".weight",),
            LAYER + "post_attention_layernorm.weight": (UP + ".weight",),
            "final_layer_norm.weight": (*READERS, HEAD),
        },
    )
