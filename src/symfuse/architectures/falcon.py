"""Falcon: one fused projection in three forms, by head, for one key and value of all heads, or by groups of heads;
rotary positions or ALiBi, whose slopes belong to the index of a head."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import (
    ALIBI,
    HEADS,
    OUTPUTS,
    READERS,
    block_axes,
    feed_forward,
    groups_of_heads,
    linear,
    norm,
    rotary_axes,
    value_shift,
)
from symfuse.groups import Group, Invertible, Permutation
from symfuse.spec import Axis, Shift

LAYER = "h.{l}."
QKV, DENSE = LAYER + "self_attention.query_key_value", LAYER + "self_attention.dense"
UP, DOWN = LAYER + "mlp.dense_h_to_4h", LAYER + "mlp.dense_4h_to_h"


def _heads(c: Config, order: Group | None, query: str, key: str) -> tuple[dict[str, Axis], str, str]:
    """The axes of heads that `order` permutes, the layout of the fused projection, and that of what they put out."""
    heads, why = c.num_attention_heads, "" if order else ALIBI
    if c.get("new_decoder_architecture", False):
        groups = groups_of_heads(c, "num_kv_heads", heads)
        axes = {"kv": Axis(groups, order, ("l",), why), "q": Axis(heads // groups, order, ("l", "kv"), why)}
        return axes, f"(kv (q {query} + {key} + v))", "(kv q v*)"
    if c.get("multi_query", True):
        return {"q": Axis(heads, order, ("l",), why)}, f"(q {query} + {key} + v)", "(q v*)"
    return {"h": Axis(heads, order, ("l",), why)}, f"(h ({query} + {key} + v))", "(h v*)"


def _norms(c: Config) -> tuple[str, str]:
    """Which norm attention reads, and which the feed-forward block."""
    if not c.get("parallel_attn", True):
        return LAYER + "input_layernorm", LAYER + "post_attention_layernorm"
    if c.get("num_ln_in_parallel_attn", 2 if c.get("new_decoder_architecture", False) else 1) == 2:
        return LAYER + "ln_attn", LAYER + "ln_mlp"
    return LAYER + "input_layernorm", LAYER + "input_layernorm"


@architecture("falcon")
def falcon(c: Config) -> Family:
    alibi, bias, ffn = c.get("alibi", False), c.get("bias", False), c.get("ffn_hidden_size", 4 * c.hidden_size)
    usual = block_axes(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, ffn, c.get("activation", "gelu"))
    order, query, key = (None, "qk", "qk*") if alibi else (Permutation(), "c f", "c* f")
    heads, fused, out = _heads(c, order, query, key)
    head, per = usual["v"].size, ("l", *(name for name in ("kv", "h") if name in heads))
    inside = {"qk": Axis(head, Invertible(), per)} if alibi else rotary_axes(head, head, per)
    axes = {name: usual[name] for name in ("l", "residual", "ffn")} | heads | inside
    axes |= {"v": Axis(head, Invertible(), per), "vocab": Axis(c.vocab_size), "labels": Axis(c.labels)}
    before, between = _norms(c)
    readers = {before + ".weight": (QKV + ".weight",)}
    readers[between + ".weight"] = (*readers.get(between + ".weight", ()), UP + ".weight")
    return Family(
        axes=axes,
        prefix="transformer.",
        tensors={
            "word_embeddings.weight": "vocab residual",
            **norm(before),
            **linear(QKV, fused, bias=bias),
            **linear(DENSE, "residual", out, bias=bias),
            **norm(between),
            **feed_forward(UP, DOWN, bias=bias),
            **norm("ln_f"),
        },
        heads=HEADS,
        tied={"lm_head.weight": "word_embeddings.weight"} if c.tied else {},
        buffers=("*rotary*.inv_freq",),
        # ALiBi adds the same whatever the key: its bias is free; a rotary one is turned by its position.
        shifts=(*((Shift(QKV + ".bias", "qk*"),) if alibi else ()), value_shift(QKV, DENSE)) if bias else (),
        outputs=OUTPUTS,
        reads=readers | {"ln_f.weight": READERS},
    )
