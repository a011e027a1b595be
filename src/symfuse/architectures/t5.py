"""T5 (also v1.1, FLAN), mT5, UMT5: RMSNorm before each block, no biases, one embedding for encoder and decoder, and a
relative bias for each head in self-attention.

The embedding is what encoder and decoder begin with, so that one element moves both streams. The bias of the first
layer serves all layers of its stack: their heads are reordered together, but in UMT5, where each layer has its own.
"""

from __future__ import annotations

from symfuse.architectures import seq2seq
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import linear, neurons, projections
from symfuse.errors import SpecError
from symfuse.groups import Signed, SignedMonomial
from symfuse.spec import Axis

SHARED, HEAD = "shared.weight", "lm_head.weight"
EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
ENCODER, DECODER = "encoder.block.{encoder_l}.layer.", "decoder.block.{decoder_l}.layer."
# Of each attention: its module, and the word before its axes; the feed-forward blocks likewise.
ENCODER_SELF, DECODER_SELF = (ENCODER + "0.SelfAttention.", "encoder"), (DECODER + "0.SelfAttention.", "decoder")
CROSS = DECODER + "1.EncDecAttention.", "cross"
FEED_FORWARD = {"encoder": ENCODER + "1.", "decoder": DECODER + "2."}
NORM = "layer_norm.weight"
BIAS = "relative_attention_bias.weight"
ONE_ORDER = "the relative bias of the first layer serves the heads of all: reordered together"
# The classes of the encoder alone.
ENCODERS = ("EncoderModel", "ForTokenClassification")


@architecture("t5")
def t5(c: Config) -> Family:
    """Of v1.0 the head is the embedding, and the decoder's output is scaled before it."""
    return _family(c, scaled=c.get("scale_decoder_outputs", c.tied))


@architecture("umt5")
def umt5(c: Config) -> Family:
    return _family(c, scaled=c.get("scale_decoder_outputs", c.tied), biases_in_all=True)


@architecture("mt5")
def mt5(c: Config) -> Family:
    return _family(c, scaled=False)


def _family(c: Config, *, scaled: bool, biases_in_all: bool = False) -> Family:
    """scaled: the decoder's output before the head. `transformers` 5 says of every model of the family that it is tied:
    if its output is not scaled, it has its own head (as v1.1 has) if there is one in the file."""
    gated, activation = _feed_forward(c)
    encoder = _stack("encoder", gated, biases_in_all)
    decoder = _stack("decoder", gated, biases_in_all)
    only = c.class_name.endswith(ENCODERS)  # or it may be, where no class is named
    ties = dict.fromkeys(EMBEDDINGS, SHARED)
    return Family(
        axes=_axes(c, gated, activation, biases_in_all),
        prefix="transformer.",
        tensors=encoder | ({} if only or not c.class_name else decoder),
        optional={} if only or c.class_name else {"decoder": decoder},
        heads=HEADS,
        tied=ties | ({HEAD: SHARED} if c.tied and scaled else {}),
        absent={HEAD: SHARED} if c.tied and not scaled else {},
        buffers=(f"*decoder.block.0.layer.1.EncDecAttention.{BIAS}",),
        outputs=seq2seq.outputs(("residual", "residual")),
        reads=_reads(c, gated, only),
        norm="rms",
    )


def _feed_forward(c: Config) -> tuple[bool, str]:
    """Whether it is gated, and its activation."""
    text = c.get("feed_forward_proj", "relu")
    gate, _, activation = text.rpartition("-")
    if gate not in ("", "gated"):
        raise SpecError(f"config.json: feed_forward_proj is {text!r}, expected an activation, or gated- and one")
    return bool(gate), "gelu_new" if text == "gated-gelu" else activation


def _axes(c: Config, gated: bool, activation: str, biases_in_all: bool) -> dict[str, Axis]:
    group = neurons(activation)
    group = SignedMonomial() if gated else group  # the other half is linear
    axes = {
        "encoder_l": Axis(c.num_layers),
        "decoder_l": Axis(c.size("num_decoder_layers", c.num_layers)),
        "vocab": Axis(c.vocab_size),
        "residual": Axis(c.d_model, Signed()),
        "buckets": Axis(c.size("relative_attention_num_buckets", 32)),
        "encoder_ffn": Axis(c.d_ff, group, ("encoder_l",)),
        "decoder_ffn": Axis(c.d_ff, group, ("decoder_l",)),
        "pool": Axis(c.d_model, Signed()),  # tanh is odd
        "labels": Axis(c.labels),
    }
    for part, layers in {"encoder": "encoder_l", "decoder": "decoder_l", "cross": "decoder_l"}.items():
        order = (layers,) if part == "cross" or biases_in_all else ()
        axes |= seq2seq.attention_axes(part, c.num_heads, c.d_kv, order, layers, "" if order else ONE_ORDER)
    return axes


def _attention(at: str, part: str) -> dict[str, str]:
    return projections(at, *"qkvo", part=part).tensors(bias="")


def _self_attention(at: str, part: str, biases_in_all: bool) -> dict[str, str]:
    first = at if biases_in_all else at.format(**{f"{part}_l": 0})
    return _attention(at, part) | {first + BIAS: f"buckets {part}_h"}


def _neurons(part: str, gated: bool) -> dict[str, str]:
    at, ffn = FEED_FORWARD[part] + "DenseReluDense.", f"{part}_ffn"
    reads = {at + "wi_0.weight": f"|{ffn}| residual*", at + "wi_1.weight": f"{ffn} residual*"}
    return (reads if gated else {at + "wi.weight": f"{ffn} residual*"}) | {at + "wo.weight": f"residual {ffn}*"}


def _stack(part: str, gated: bool, biases_in_all: bool) -> dict[str, str]:
    """The tensors of the encoder, with the shared embedding, or of the decoder."""
    encoder = part == "encoder"
    blocks = [_self_attention(*(ENCODER_SELF if encoder else DECODER_SELF), biases_in_all)]
    blocks += [] if encoder else [_attention(*CROSS)]
    at = ENCODER if encoder else DECODER
    out = dict.fromkeys((SHARED, EMBEDDINGS[0]) if encoder else EMBEDDINGS[1:], "vocab residual")
    for number, tensors in enumerate([*blocks, _neurons(part, gated)]):
        out |= {f"{at}{number}.{NORM}": "|residual|", **tensors}
    return out | {f"{part}.final_{NORM}": "|residual|"}


HEADS = {
    "conditional": Head(("ForConditionalGeneration",), {HEAD: "vocab residual*"}),
    "sequence": Head(
        ("ForSequenceClassification",),
        linear("classification_head.dense", "pool") | linear("classification_head.out_proj", "labels", "pool*"),
    ),
    "token": Head(("ForTokenClassification",), linear("classifier", "labels")),
    "question": Head(("ForQuestionAnswering",), linear("qa_outputs", "labels")),
}


def _reads(c: Config, gated: bool, only: bool) -> dict[str, tuple[str, ...]]:
    """The last norm of the encoder is read by the keys and values of all of the decoder."""
    wi = ("wi_0", "wi_1") if gated else ("wi",)
    decoders = range(c.size("num_decoder_layers", c.num_layers))
    cross = (f"{CROSS[0]}{name}.weight".format(decoder_l=at) for at in decoders for name in "kv")
    reads = {
        "encoder.final_" + NORM: (
            *cross, "classifier.weight", "last_hidden_state" if only else "encoder_last_hidden_state",
        ),
        "decoder.final_" + NORM: (
            "last_hidden_state", HEAD, "classification_head.dense.weight", "qa_outputs.weight",
        ),
        DECODER + "1." + NORM: (CROSS[0] + "q.weight",),
    }  # fmt: skip
    for part, at in {"encoder": ENCODER, "decoder": DECODER}.items():
        reads[at + "0." + NORM] = tuple(f"{at}0.SelfAttention.{letter}.weight" for letter in "qkv")
        reads[FEED_FORWARD[part] + NORM] = tuple(f"{FEED_FORWARD[part]}DenseReluDense.{name}.weight" for name in wi)
    return reads
