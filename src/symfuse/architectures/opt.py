"""OPT: learned positions, ReLU; norms before each block, or after it (350m); embeddings of their own size in some."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import HEADS, READERS, block_axes, feed_forward, linear, norms, placed, projections
from symfuse.groups import Centred, Invertible
from symfuse.spec import Axis

LAYER = "decoder.layers.{l}."
NAMES = projections(LAYER + "self_attn.", "q_proj", "k_proj", "v_proj", "out_proj")
EMBEDDING, LAST = "decoder.embed_tokens.weight", "decoder.final_layer_norm"
OFFSET = 2  # the first rows of the table of positions, which no position reads


@architecture("opt")
def opt(c: Config) -> Family:
    bias, gains = c.get("enable_bias", True), c.get("layer_norm_elementwise_affine", True)
    before = c.get("do_layer_norm_before", True)
    last = before and not c.get("_remove_final_layer_norm", False)
    narrow = c.get("word_embed_proj_dim", c.hidden_size)
    projected = narrow != c.hidden_size
    axes = block_axes(
        c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.ffn_dim, c.get("activation_function", "relu")
    )
    axes |= {
        "vocab": Axis(c.vocab_size),
        "positions": Axis(c.max_position_embeddings + OFFSET),
        "labels": Axis(c.labels),
        "embedding": Axis(narrow, Invertible()),
        "lm": Axis(narrow, Invertible()),  # where the head is not the embedding
    }
    if not gains:  # a norm without gains commutes with all that keeps the mean
        axes["residual"] = Axis(c.hidden_size, Centred())
    # Of a projected stream: what it is written to, and what reads that. A tied head is the embedding: its dual is read.
    out, read = ("residual", "residual*") if not projected else ("embedding*", "embedding") if c.tied else ("lm", "lm*")
    places = [LAYER + "self_attn_layer_norm", LAYER + "final_layer_norm", *([LAST] if last else [])]
    return Family(
        axes=axes,
        prefix="model.",
        tensors={
            EMBEDDING: "vocab embedding" if projected else "vocab residual",
            "decoder.embed_positions.weight": "positions residual",
            **(linear("decoder.project_in", "residual", "embedding*", bias=False) if projected else {}),
            **NAMES.tensors(bias="qkvo" if bias else ""),
            **feed_forward(LAYER + "fc1", LAYER + "fc2", bias=bias),
            **(norms(*places) if gains else {}),
            **(linear("decoder.project_out", out, bias=False) if projected else {}),
        },
        heads={
            name: Head(HEADS[name].classes, placed(HEADS[name].tensors, {"residual*": read}))
            for name in ("causal LM", "sequence", "question")
        },
        tied={"lm_head.weight": EMBEDDING} if c.tied else {},
        shifts=NAMES.shifts() if bias else (),
        outputs={"last_hidden_state": out},
        reads={
            LAYER + "self_attn_layer_norm.weight": NAMES.readers,
            LAYER + "final_layer_norm.weight": (LAYER + "fc1.weight",),
            LAST + ".weight": ("decoder.project_out.weight",) if projected else READERS,
        }
        if gains and last
        else {},
    )
