"""BLOOM: queries, keys and values fused for each head; ALiBi, whose slopes belong to the index of a head; a norm of the
embedding. Through the gain of that norm the stream cannot be rotated."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ALIBI, HEADS, OUTPUTS, block_axes, linear, norm, value_shift
from symfuse.spec import Axis, Shift

LAYER = "h.{l}."
QKV, DENSE = LAYER + "self_attention.query_key_value", LAYER + "self_attention.dense"


def _size(c: Config, name: str, other: str) -> int:
    """Of two spellings, the one that is there."""
    size: int = getattr(c, other if c.get(name) is None else name)
    return size


@architecture("bloom")
def bloom(c: Config) -> Family:
    c.get("apply_residual_connection_post_layernorm", False)  # decides the function, and nothing here
    layers, heads = _size(c, "n_layer", "num_hidden_layers"), _size(c, "n_head", "num_attention_heads")
    hidden = _size(c, "n_embed", "hidden_size")
    axes = block_axes(layers, hidden, heads, 4 * hidden, "gelu_new")
    return Family(
        axes=axes | {"h": Axis(heads, why=ALIBI), "vocab": Axis(c.vocab_size), "labels": Axis(c.labels)},
        prefix="transformer.",
        tensors={
            "word_embeddings.weight": "vocab residual",
            **norm("word_embeddings_layernorm"),
            **norm(LAYER + "input_layernorm"),
            **linear(QKV, "(h (qk + qk* + v))"),
            **linear(DENSE, "residual", "(h v*)"),
            **norm(LAYER + "post_attention_layernorm"),
            **linear(LAYER + "mlp.dense_h_to_4h", "ffn"),
            **linear(LAYER + "mlp.dense_4h_to_h", "residual", "ffn*"),
            **norm("ln_f"),
        },
        heads=HEADS,
        tied={"lm_head.weight": "word_embeddings.weight"} if c.tied else {},
        # What ALiBi adds does not depend on the key: its bias is free.
        shifts=(Shift(QKV + ".bias", "qk*"), value_shift(QKV, DENSE)),
        outputs=OUTPUTS,
    )
