"""BERT: post-norm encoder, learned absolute positions, separate query, key and value projections."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, key_shift, post_norm, value_shift
from symfuse.groups import Permutation, Signed
from symfuse.spec import Axis

LAYER = "encoder.layer.{l}."
SELF = LAYER + "attention.self."

ENCODER = {
    SELF + "query.weight": "(h qk) residual*",
    SELF + "query.bias": "(h qk)",
    SELF + "key.weight": "(h qk*) residual*",
    SELF + "key.bias": "(h qk*)",
    SELF + "value.weight": "(h v) residual*",
    SELF + "value.bias": "(h v)",
    LAYER + "attention.output.dense.weight": "residual (h v*)",
    LAYER + "attention.output.dense.bias": "residual",
    LAYER + "attention.output.LayerNorm.weight": "|residual|",
    LAYER + "attention.output.LayerNorm.bias": "residual",
    LAYER + "intermediate.dense.weight": "ffn residual*",
    LAYER + "intermediate.dense.bias": "ffn",
    LAYER + "output.dense.weight": "residual ffn*",
    LAYER + "output.dense.bias": "residual",
    LAYER + "output.LayerNorm.weight": "|residual|",
    LAYER + "output.LayerNorm.bias": "residual",
}
EMBEDDINGS = {
    "embeddings.word_embeddings.weight": "vocab residual",
    "embeddings.position_embeddings.weight": "positions residual",
    "embeddings.token_type_embeddings.weight": "types residual",
    "embeddings.LayerNorm.weight": "|residual|",
    "embeddings.LayerNorm.bias": "residual",
}
POOLER = {"pooler.dense.weight": "pool residual*", "pooler.dense.bias": "pool"}
SHIFTS = (key_shift(SELF + "key"), value_shift(SELF + "value", LAYER + "attention.output.dense"))
BUFFERS = ("*embeddings.position_ids", "*embeddings.token_type_ids")
LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
OUTPUTS = {"last_hidden_state": "residual", "pooler_output": "pool"}

POOLED = {"classifier.weight": "labels pool*", "classifier.bias": "labels"}
CHOICE = Head(("ForMultipleChoice",), {"classifier.weight": "1 pool*", "classifier.bias": "1"})
TOKEN = Head(("ForTokenClassification",), {"classifier.weight": "labels residual*", "classifier.bias": "labels"})
QUESTION = Head(("ForQuestionAnswering",), {"qa_outputs.weight": "labels residual*", "qa_outputs.bias": "labels"})


def gauges(layers: int, *last: str, transform: tuple[str, str] = ("", "")) -> dict[str, str]:
    """Which norm each weight reads. last: what reads the last layer. transform: a head's norm, and what reads that."""
    own = post_norm(
        layers,
        [f"{SELF}{name}." for name in ("query", "key", "value")],
        LAYER + "intermediate.dense.",
        (LAYER + "attention.output.LayerNorm", LAYER + "output.LayerNorm"),
        "embeddings.LayerNorm",
        [f"{name}." for name in ("pooler.dense", "classifier", "qa_outputs", *last)],
    )
    norm, reader = transform
    return own | ({f"{reader}.weight": f"{norm}.weight"} if norm else {})


def encoder_axes(c: Config) -> dict[str, Axis]:
    act = c.get("hidden_act", "gelu")
    return block_axes(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act) | {
        "vocab": Axis(c.vocab_size),
        "positions": Axis(c.max_position_embeddings),
        "types": Axis(c.get("type_vocab_size", 2)),
        "pool": Axis(c.hidden_size, Signed()),  # tanh is odd
        "lm": Axis(c.hidden_size, Permutation()),  # of a decoder that is not the embedding
        "labels": Axis(c.labels),
    }


@architecture("bert")
def bert(c: Config) -> Family:
    # With a tied decoder the transform writes into the residual space of the embeddings; else into its own.
    lm = "residual" if c.tied else "lm"
    predictions = "cls.predictions."
    return Family(
        axes=encoder_axes(c),
        prefix="bert.",
        tensors=EMBEDDINGS | ENCODER,
        optional={"pooler": POOLER},
        heads={
            "masked LM": Head(
                ("ForMaskedLM", "ForPreTraining", "LMHeadModel"),
                {
                    predictions + "bias": "vocab",
                    predictions + "transform.dense.weight": f"{lm} residual*",
                    predictions + "transform.dense.bias": lm,
                    predictions + "transform.LayerNorm.weight": f"|{lm}|",
                    predictions + "transform.LayerNorm.bias": lm,
                    predictions + "decoder.weight": f"vocab {lm}*",
                    predictions + "decoder.bias": "vocab",
                },
            ),
            "next sentence": Head(
                ("ForPreTraining", "ForNextSentencePrediction"),
                {"cls.seq_relationship.weight": "2 pool*", "cls.seq_relationship.bias": "2"},
            ),
            "sequence": Head(("ForSequenceClassification",), POOLED),
            "choice": CHOICE,
            "token": TOKEN,
            "question": QUESTION,
        },
        tied={
            predictions + "decoder.weight": "embeddings.word_embeddings.weight",
            predictions + "decoder.bias": predictions + "bias",
        }
        if c.tied
        else {},
        buffers=BUFFERS,
        legacy=LEGACY,
        shifts=SHIFTS,
        outputs=OUTPUTS,
        gauges=gauges(
            c.num_hidden_layers,
            predictions + "transform.dense",
            transform=(predictions + "transform.LayerNorm", predictions + "decoder"),
        ),
    )
