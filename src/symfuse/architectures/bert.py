"""BERT: post-norm encoder, learned absolute positions, separate query, key and value projections. ERNIE and LayoutLM:
BERT with further embeddings. Megatron-BERT: BERT with its norms before the blocks."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, dense_head, feed_forward, linear, norm, post_norm, projections
from symfuse.architectures.names import LEGACY
from symfuse.groups import Permutation, Signed
from symfuse.spec import Axis

LAYER = "encoder.layer.{l}."
SELF = LAYER + "attention.self."

NAMES = projections(LAYER + "attention.", "self.query", "self.key", "self.value", "output.dense")
ENCODER = {
    **NAMES.tensors(),
    **norm(LAYER + "attention.output.LayerNorm"),
    **feed_forward(LAYER + "intermediate.dense", LAYER + "output.dense"),
    **norm(LAYER + "output.LayerNorm"),
}
WORDS = "embeddings.word_embeddings.weight"
EMBEDDINGS = {
    WORDS: "vocab residual",
    "embeddings.position_embeddings.weight": "positions residual",
    "embeddings.token_type_embeddings.weight": "types residual",
    **norm("embeddings.LayerNorm"),
}
POOLER = linear("pooler.dense", "pool")
SHIFTS = NAMES.shifts()
BUFFERS = ("*embeddings.position_ids", "*embeddings.token_type_ids")
OUTPUTS = {"last_hidden_state": "residual", "pooler_output": "pool"}

PREDICTIONS = "cls.predictions."
TRANSFORM = PREDICTIONS + "transform."
POOLED = linear("classifier", "labels", "pool*")
CHOICE = Head(("ForMultipleChoice",), linear("classifier", "1", "pool*"))
TOKEN = Head(("ForTokenClassification",), linear("classifier", "labels"))
QUESTION = Head(("ForQuestionAnswering",), linear("qa_outputs", "labels"))


def predictions(c: Config, norm_name: str = "LayerNorm", embedding: str = "residual") -> dict[str, str]:
    """The head of the masked language model; embedding: as of `dense_head`."""
    head = dense_head(c, TRANSFORM + "dense", TRANSFORM + norm_name, PREDICTIONS + "decoder", embedding)
    return {PREDICTIONS + "bias": "vocab", **head}


def ties(c: Config, decoder: str = PREDICTIONS + "decoder", bias: str = PREDICTIONS + "bias") -> dict[str, str]:
    """A tied decoder is the embedding of the words, and its bias that of the head."""
    return {decoder + ".weight": WORDS, decoder + ".bias": bias} if c.tied else {}


def gauges(layers: int, *last: str, transform: tuple[str, str] = ("", "")) -> dict[str, str]:
    """Which norm each weight reads. last: what reads the last layer. transform: a head's norm, and what reads that."""
    own = post_norm(
        layers,
        [f"{NAMES[letter]}." for letter in "qkv"],
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
    return Family(
        axes=encoder_axes(c),
        prefix="bert.",
        tensors=EMBEDDINGS | ENCODER,
        optional={"pooler": POOLER},
        heads={
            "masked LM": Head(("ForMaskedLM", "ForPreTraining", "LMHeadModel"), predictions(c)),
            "next sentence": Head(
                ("ForPreTraining", "ForNextSentencePrediction"), linear("cls.seq_relationship", "2", "pool*")
            ),
            "sequence": Head(("ForSequenceClassification",), POOLED),
            "choice": CHOICE,
            "token": TOKEN,
            "question": QUESTION,
        },
        tied=ties(c),
        buffers=BUFFERS,
        legacy=LEGACY,
        shifts=SHIFTS,
        outputs=OUTPUTS,
        gauges=gauges(
            c.num_hidden_layers, TRANSFORM + "dense", transform=(TRANSFORM + "LayerNorm", PREDICTIONS + "decoder")
        ),
    )


@architecture("ernie")
def ernie(c: Config) -> Family:
    family = replace(bert(c), prefix="ernie.")
    if not c.get("use_task_id", False):
        return family
    tasks = Axis(c.size("task_type_vocab_size", 3))
    return family.plus(axes={"tasks": tasks}, tensors={"embeddings.task_type_embeddings.weight": "tasks residual"})


@architecture("layoutlm")
def layoutlm(c: Config) -> Family:
    """Where a token stands on its page: the edges of its box, its height and its width."""
    boxes = {f"embeddings.{side}_position_embeddings.weight": "places residual" for side in "xyhw"}
    places = Axis(c.size("max_2d_position_embeddings", 1024))
    return replace(bert(c), prefix="layoutlm.").plus(axes={"places": places}, tensors=boxes)


def pre_norm(family: Family, attention: str, ffn: str, last: str, *, embeddings: bool = False) -> Family:
    """The family with norms of these names before its blocks, and one after the last. embeddings: whether these have a
    norm: then its gain stays in the stream, which only permutations may act on."""
    kept = {n: text for n, text in family.tensors.items() if "LayerNorm" not in n or (embeddings and "embed" in n)}
    norms = norm(LAYER + attention) | norm(LAYER + ffn) | norm(last)
    dense = ("pooler.dense", "classifier", "classifier.dense", "qa_outputs", "lm_head.dense", TRANSFORM + "dense")
    reads = {
        f"{LAYER}{attention}.weight": NAMES.readers,
        f"{LAYER}{ffn}.weight": (LAYER + "intermediate.dense.weight",),
        f"{last}.weight": ("last_hidden_state", *(f"{name}.weight" for name in dense)),
    }
    gauges = {
        reader: gain for reader, gain in family.gauges.items() if not gain.startswith(("embeddings.", "encoder."))
    }
    return replace(family, tensors=kept | norms, reads={} if embeddings else reads, gauges=gauges)


@architecture("megatron-bert")
def megatron_bert(c: Config) -> Family:
    return pre_norm(bert(c), "attention.ln", "ln", "encoder.ln")


@architecture("bert-generation")
def bert_generation(c: Config) -> Family:
    """There are no types of tokens, and the decoder reads the stream as it is."""
    tensors = {name: text for name, text in (EMBEDDINGS | ENCODER).items() if "token_type" not in name}
    decoder = linear("lm_head.decoder", "vocab") | {"lm_head.bias": "vocab"}
    return replace(
        bert(c),
        tensors=tensors,
        heads={"decoder": Head(("Decoder",), decoder)},
        tied=ties(c, "lm_head.decoder", "lm_head.bias"),
        gauges=gauges(c.num_hidden_layers, "lm_head.decoder"),
    )
