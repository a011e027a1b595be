"""BERT: post-norm encoder, learned absolute positions, separate query, key and value projections."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.groups import Conformal, Permutation, Signed
from symfuse.spec import Axis, Shift
from symfuse.architectures.feed_forward import neurons

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
SHIFTS = (
    Shift(SELF + "key.bias", "qk*"),
    Shift(SELF + "value.bias", "v", LAYER + "attention.output.dense.weight", LAYER + "attention.output.dense.bias"),
)


def encoder_axes(c: Config) -> dict[str, Axis]:
    head = c.hidden_size // c.num_attention_heads
    return {
        "l": Axis(c.num_hidden_layers),
        "vocab": Axis(c.vocab_size),
        "positions": Axis(c.max_position_embeddings),
        "types": Axis(c.get("type_vocab_size", 2)),
        "residual": Axis(c.hidden_size, Permutation()),  # post-norm: the gain after centring allows no more
        "h": Axis(c.num_attention_heads, Permutation(), per=("l",)),
        "qk": Axis(head, Conformal(), per=("l", "h")),
        "v": Axis(head, Conformal(), per=("l", "h")),
        "ffn": Axis(c.intermediate_size, neurons(c.get("hidden_act", "gelu")), per=("l",)),
        "pool": Axis(c.hidden_size, Signed()),  # tanh is odd
        "labels": Axis(len(c.get("id2label", {})) or c.get("num_labels", 2)),
    }


@architecture("bert")
def bert(c: Config) -> Family:
    # With a tied decoder the transform writes into the residual space of the embeddings; else into its own.
    lm = "residual" if c.tied else "lm"
    return Family(
        axes=encoder_axes(c) | {"lm": Axis(c.hidden_size, Permutation())},
        prefix="bert.",
        tensors=EMBEDDINGS | ENCODER,
        optional={"pooler": POOLER},
        heads={
            "masked LM": Head(
                ("ForMaskedLM", "ForPreTraining", "LMHeadModel"),
                {
                    "cls.predictions.bias": "vocab",
                    "cls.predictions.transform.dense.weight": f"{lm} residual*",
                    "cls.predictions.transform.dense.bias": lm,
                    "cls.predictions.transform.LayerNorm.weight": f"|{lm}|",
                    "cls.predictions.transform.LayerNorm.bias": lm,
                    "cls.predictions.decoder.weight": f"vocab {lm}*",
                    "cls.predictions.decoder.bias": "vocab",
                },
            ),
            "next sentence": Head(
                ("ForPreTraining", "ForNextSentencePrediction"),
                {"cls.seq_relationship.weight": "2 pool*", "cls.seq_relationship.bias": "2"},
            ),
            "sequence": Head(
                ("ForSequenceClassification", "ForMultipleChoice"),
                {"classifier.weight": "labels pool*", "classifier.bias": "labels"},
            ),
        },
        tied={"cls.predictions.decoder.bias": "cls.predictions.bias"}
        | ({"cls.predictions.decoder.weight": "embeddings.word_embeddings.weight"} if c.tied else {}),
        buffers=("*embeddings.position_ids", "*embeddings.token_type_ids"),
        legacy={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        shifts=SHIFTS,
        outputs={"last_hidden_state": "residual", "pooler_output": "pool"},
    )
