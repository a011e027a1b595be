"""Falcon: one fused projection in three forms, by head, for one key and value of all heads, or by groups of heads;
rotary positions or ALiBi, whose slopes belong to the index of a head. BLOOM: fused by head, ALiBi, a norm of the
embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
    norms,
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


def _family(
    c: Config, axes: Mapping[str, Axis], fused: str, out: str, places: tuple[str, str], bias: bool, *first: str
) -> Family:
    """fused, out: the layouts of the fused projection, and of what heads put out. places: the norms that attention and
    the feed-forward read. first: that of the embedding."""
    before, between = places
    free = (Shift(QKV + ".bias", "qk*"),) if "qk" in axes else ()  # ALiBi adds the same whatever the key
    reads = {before + ".weight": (QKV + ".weight",)}
    reads[between + ".weight"] = (*reads.get(between + ".weight", ()), UP + ".weight")
    return Family(
        axes={**axes, "vocab": Axis(c.vocab_size), "labels": Axis(c.labels)},
        prefix="transformer.",
        tensors={
            "word_embeddings.weight": "vocab residual",
            **norms(*first, before),
            **linear(QKV, fused, bias=bias),
            **linear(DENSE, "residual", out, bias=bias),
            **norm(between),
            **feed_forward(UP, DOWN, bias=bias),
            **norm("ln_f"),
        },
        heads=HEADS,
        tied={"lm_head.weight": "word_embeddings.weight"} if c.tied else {},
        shifts=(*free, value_shift(QKV, DENSE)) if bias else (),
        outputs=OUTPUTS,
        reads={} if first else reads | {"ln_f.weight": READERS},
    )


@architecture("falcon")
def falcon(c: Config) -> Family:
    alibi, bias, ffn = c.get("alibi", False), c.get("bias", False), c.get("ffn_hidden_size", 4 * c.hidden_size)
    usual = block_axes(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, ffn, c.get("activation", "gelu"))
    order, query, key = (None, "qk", "qk*") if alibi else (Permutation(), "c f", "c* f")
    heads, fused, out = _heads(c, order, query, key)
    head, per = usual["v"].size, ("l", *(name for name in ("kv", "h") if name in heads))
    inside = {"qk": Axis(head, Invertible(), per)} if alibi else rotary_axes(head, head, per)
    axes = {name: usual[name] for name in ("l", "residual", "ffn")} | heads | inside
    family = _family(c, axes | {"v": Axis(head, Invertible(), per)}, fused, out, _norms(c), bias)
    return replace(family, buffers=("*rotary*.inv_freq",))


def _size(c: Config, name: str, other: str) -> int:
    """Of two spellings, the one that is there."""
    size: int = getattr(c, other if c.get(name) is None else name)
    return size


@architecture("bloom")
def bloom(c: Config) -> Family:
    """Through the gain of the embedding's norm the stream cannot be rotated."""
    c.get("apply_residual_connection_post_layernorm", False)  # decides the function, and nothing here
    layers, heads = _size(c, "n_layer", "num_hidden_layers"), _size(c, "n_head", "num_attention_heads")
    hidden = _size(c, "n_embed", "hidden_size")
    axes = block_axes(layers, hidden, heads, 4 * hidden, "gelu_new") | {"h": Axis(heads, why=ALIBI)}
    places = LAYER + "input_layernorm", LAYER + "post_attention_layernorm"
    return _family(c, axes, "(h (qk + qk* + v))", "(h v*)", places, True, "word_embeddings_layernorm")
