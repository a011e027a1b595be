"""DistilBERT: BERT's blocks under other names, no token types, a ReLU before the classifier."""

from __future__ import annotations

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, dense_head, linear, neurons, post_norm, projections, renamed
from symfuse.groups import Permutation
from symfuse.spec import Axis

LAYER = "transformer.layer.{l}."
PROJECTIONS = projections(LAYER + "attention.", "q_lin", "k_lin", "v_lin", "out_lin")
NAMES = dict(zip(bert.NAMES.values(), PROJECTIONS.values(), strict=True)) | {
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
    "encoder.layer": "transformer.layer",
}


@architecture("distilbert")
def distilbert(c: Config) -> Family:
    pre = linear("pre_classifier", "pre")
    embeddings = {name: text for name, text in bert.EMBEDDINGS.items() if "token_type" not in name}
    return Family(
        axes=block_axes(c.n_layers, c.dim, c.n_heads, c.hidden_dim, c.get("activation", "gelu"))
        | {
            "vocab": Axis(c.vocab_size),
            "positions": Axis(c.max_position_embeddings),
            "pre": Axis(c.dim, neurons("relu")),
            "lm": Axis(c.dim, Permutation()),
            "labels": Axis(c.labels),
        },
        prefix="distilbert.",
        tensors=embeddings | renamed(bert.ENCODER, NAMES),
        heads={
            "masked LM": Head(
                ("ForMaskedLM",), dense_head(c, "vocab_transform", "vocab_layer_norm", "vocab_projector")
            ),
            "sequence": Head(("ForSequenceClassification",), pre | linear("classifier", "labels", "pre*")),
            "choice": Head(("ForMultipleChoice",), pre | linear("classifier", "1", "pre*")),
            "token": bert.TOKEN,
            "question": bert.QUESTION,
        },
        tied={"vocab_projector.weight": bert.WORDS} if c.tied else {},
        buffers=bert.BUFFERS,
        shifts=PROJECTIONS.shifts(),
        outputs={"last_hidden_state": "residual"},
        gauges=post_norm(
            c.n_layers,
            [f"{PROJECTIONS[letter]}." for letter in "qkv"],
            LAYER + "ffn.lin1.",
            (LAYER + "sa_layer_norm", LAYER + "output_layer_norm"),
            "embeddings.LayerNorm",
            [f"{name}." for name in ("vocab_transform", "pre_classifier", "classifier", "qa_outputs")],
        )
        | {"vocab_projector.weight": "vocab_layer_norm.weight"},
    )
