"""Marian and M2M-100 (NLLB): positions are sines that `transformers` makes anew when it loads a model, and does not
save. They tell the entries of the stream apart, which so has no symmetry: no permutation leaves such a table."""

from __future__ import annotations

from symfuse.architectures import bart, seq2seq
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import linear
from symfuse.spec import Axis

STREAMS = ("residual", "residual")
SINES = "the sines of positions are made anew on loading, and tell its entries apart"


@architecture("marian")
def marian(c: Config) -> Family:
    """The bare model stores its tables. It could be permuted, and as soon as it is trained with a head be wrong."""
    axes = (
        seq2seq.axes(c) | seq2seq.stream_axes(c, STREAMS, None, SINES) | {"positions": Axis(c.max_position_embeddings)}
    )
    vocab = "vocab"
    if c.get("share_encoder_decoder_embeddings", True):
        embeddings, tied = bart.embeddings(c, STREAMS), bart.TIES
    else:
        vocab = "decoder_vocab"
        axes[vocab] = Axis(c.size("decoder_vocab_size", c.vocab_size))
        embeddings = dict(zip(bart.EMBEDDINGS, ("vocab residual", f"{vocab} residual"), strict=True))
        tied = {"lm_head.weight": bart.EMBEDDINGS[1]}
    return Family(
        axes=axes,
        prefix="model.",
        tensors=embeddings | seq2seq.layers(STREAMS),
        optional={"positions": bart.positions(STREAMS)},
        heads=bart.heads("residual", vocab),
        tied=tied if c.tied else {},
        buffers=bart.BUFFERS,
        shifts=seq2seq.shifts(),
        outputs=seq2seq.outputs(STREAMS),
    )


@architecture("m2m_100")
def m2m_100(c: Config) -> Family:
    head = Head(("ForConditionalGeneration",), linear("lm_head", "vocab", bias=False))
    return Family(
        axes=seq2seq.axes(c) | seq2seq.stream_axes(c, STREAMS, None, SINES),
        prefix="model.",
        tensors=bart.embeddings(c, STREAMS) | seq2seq.layers(STREAMS) | seq2seq.last_norms(STREAMS),
        heads={"conditional": head},
        tied=bart.TIES if c.tied else {},
        buffers=(*bart.BUFFERS, "*embed_positions.weights"),
        shifts=seq2seq.shifts(),
        outputs=seq2seq.outputs(STREAMS),
    )
