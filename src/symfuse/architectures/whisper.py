"""Whisper: sounds through two convolutions into an encoder, whose sines are stored; a decoder with learned positions.

Nothing but the cross-attention joins the two streams, and so each has an element of its own. What the encoder is
written by has passed through GELU: it may be permuted, and not be rotated as the decoder's may.
"""

from __future__ import annotations

from symfuse.architectures import seq2seq
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import linear
from symfuse.groups import Permutation
from symfuse.spec import Axis

STREAMS = ENCODER, DECODER = ("encoder_residual", "decoder_residual")
BIASES = "qvo"  # keys have none
EMBEDDING, HEAD = "decoder.embed_tokens.weight", "proj_out"


@architecture("whisper")
def whisper(c: Config) -> Family:
    return Family(
        axes=seq2seq.axes(c)
        | seq2seq.stream_axes(c, STREAMS[:1], Permutation(), "written through GELU: reordered only")
        | seq2seq.stream_axes(c, STREAMS[1:], Permutation())
        | {
            "mels": Axis(c.num_mel_bins),
            "stem": Axis(c.d_model, Permutation()),  # between the convolutions
            "times": Axis(c.max_source_positions),
            "positions": Axis(c.max_target_positions),
        },
        prefix="model.",
        tensors={
            "encoder.conv1.weight": "stem mels 3",
            "encoder.conv1.bias": "stem",
            "encoder.conv2.weight": f"{ENCODER} stem* 3",
            "encoder.conv2.bias": ENCODER,
            "encoder.embed_positions.weight": f"times {ENCODER}",
            EMBEDDING: f"vocab {DECODER}",
            "decoder.embed_positions.weight": f"positions {DECODER}",
            **seq2seq.layers(STREAMS, BIASES),
            **seq2seq.last_norms(STREAMS),
        },
        heads={"conditional": Head(("ForConditionalGeneration",), linear(HEAD, "vocab", f"{DECODER}*", bias=False))},
        tied={HEAD + ".weight": EMBEDDING} if c.tied else {},
        shifts=seq2seq.shifts(BIASES),
        outputs=seq2seq.outputs(STREAMS),
        reads=seq2seq.decoder_reads(HEAD + ".weight"),
    )
