"""DistilBERT: BERT's blocks under other names, no token types, a ReLU before the classifier."""

from __future__ import annotations

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, key_shift, post_norm, renamed, value_shift
from symfuse.architectures.feed_forward import neurons
from symfuse.groups import Permutation
from symfuse.spec import Axis

LAYER = "transformer.layer.{l}."
NAMES = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
    "encoder.layer": "transformer.layer",
}


@architecture("distilbert")
def distilbert(c: Config) -> Family:
    lm = "residual" if c.tied else "lm"
    pre = {"pre_classifier.weight": "pre residual*", "pre_classifier.bias": "pre"}
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
                ("ForMaskedLM",),
                {
                    "vocab_transform.weight": f"{lm} residual*",
                    "vocab_transform.bias": lm,
                    "vocab_layer_norm.weight": f"|{lm}|",
                    "vocab_layer_norm.bias": lm,
                    "vocab_projector.weight": f"vocab {lm}*",
                    "vocab_projector.bias": "vocab",
                },
            ),
            "sequence": Head(
                ("ForSequenceClassification",),
                pre | {"classifier.weight": "labels pre*", "classifier.bias": "labels"},
            ),
            "choice": Head(("ForMultipleChoice",), pre | {"classifier.weight": "1 pre*", "classifier.bias": "1"}),
            "token": bert.TOKEN,
            "question": bert.QUESTION,
        },
        tied={"vocab_projector.weight": "embeddings.word_embeddings.weight"} if c.tied else {},
        buffers=bert.BUFFERS,
        shifts=(
            key_shift(LAYER + "attention.k_lin"),
            value_shift(LAYER + "attention.v_lin", LAYER + "attention.out_lin"),
        ),
        outputs={"last_hidden_state": "residual"},
        gauges=post_norm(
            c.n_layers,
            [f"{LAYER}attention.{name}." for name in ("q_lin", "k_lin", "v_lin")],
            LAYER + "ffn.lin1.",
            (LAYER + "sa_layer_norm", LAYER + "output_layer_norm"),
            "embeddings.LayerNorm",
            [f"{name}." for name in ("vocab_transform", "pre_classifier", "classifier", "qa_outputs")],
        )
        | {"vocab_projector.weight": "vocab_layer_norm.weight"},
    )
