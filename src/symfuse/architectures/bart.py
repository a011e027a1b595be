"""BART, PLBart, mBART, Pegasus, Blenderbot: encoders with decoders, biases everywhere, learned or stored positions;
norms after each block, or before it. One embedding is written and read by all, if the config does not untie them. LED:
BART with Longformer's attention in its encoder."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import seq2seq
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import Projections, key_shift, linear, norm, projections
from symfuse.groups import Permutation
from symfuse.spec import Axis

SHARED = "shared.weight"
EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
TIES = dict.fromkeys((*EMBEDDINGS, "lm_head.weight"), SHARED)
BUFFERS = ("*encoder.version", "*decoder.version")
READERS = ("lm_head.weight", "classification_head.dense.weight", "qa_outputs.weight")
OFFSET = 2  # the first rows of a table of positions, which no position reads


def heads(stream: str, vocab: str = "vocab") -> dict[str, Head]:
    """Of a decoder with that stream, and rows for the words of that axis."""
    head = linear("lm_head", vocab, f"{stream}*", bias=False) | {"final_logits_bias": f"1 {vocab}"}
    dense, out = (f"classification_head.{name}" for name in ("dense", "out_proj"))
    return {
        "conditional": Head(("ForConditionalGeneration", "MTModel"), head),
        "sequence": Head(
            ("ForSequenceClassification",), linear(dense, "pool", f"{stream}*") | linear(out, "labels", "pool*")
        ),
        "question": Head(("ForQuestionAnswering",), linear("qa_outputs", "2", f"{stream}*")),
    }


def embeddings(c: Config, streams: seq2seq.Streams) -> dict[str, str]:
    """The embeddings of the words. The shared one is read if it is both others, and else by nothing."""
    shared = f"vocab {streams[0]}" if c.tied else f"vocab {c.d_model}"
    return {SHARED: shared} | {name: f"vocab {stream}" for name, stream in zip(EMBEDDINGS, streams, strict=True)}


def positions(streams: seq2seq.Streams) -> dict[str, str]:
    return {
        f"{part}.embed_positions.weight": f"positions {stream}"
        for part, stream in zip(("encoder", "decoder"), streams, strict=True)
    }


def bart_like(c: Config, rows: int, *, before: bool, embedding_norm: bool) -> Family:
    """rows: of the tables of positions. before: norms before each block, and one after the last."""
    streams = ("residual", "residual") if c.tied else ("encoder_residual", "decoder_residual")
    tensors = embeddings(c, streams) | positions(streams)
    if embedding_norm:
        for part, stream in zip(("encoder", "decoder"), streams, strict=True):
            tensors |= norm(f"{part}.layernorm_embedding", stream)
    rotatable = before and not embedding_norm  # else gains of norms stand in the stream
    return Family(
        axes=seq2seq.axes(c) | seq2seq.stream_axes(c, streams, Permutation()) | {"positions": Axis(rows)},
        prefix="model.",
        tensors=tensors | seq2seq.layers(streams) | (seq2seq.last_norms(streams) if before else {}),
        heads=heads(streams[1]),
        tied=TIES if c.tied else {},
        buffers=BUFFERS,
        shifts=seq2seq.shifts(),
        outputs=seq2seq.outputs(streams),
        reads=seq2seq.encoder_reads(c) | seq2seq.decoder_reads(*READERS) if rotatable else {},
    )


@architecture("bart", "plbart")
def bart(c: Config) -> Family:
    return bart_like(c, c.max_position_embeddings + OFFSET, before=False, embedding_norm=True)


@architecture("blenderbot-small")
def blenderbot_small(c: Config) -> Family:
    return bart_like(c, c.max_position_embeddings, before=False, embedding_norm=True)


@architecture("mbart")
def mbart(c: Config) -> Family:
    return bart_like(c, c.max_position_embeddings + OFFSET, before=True, embedding_norm=True)


@architecture("pegasus", "blenderbot")
def pegasus(c: Config) -> Family:
    """The sines of Pegasus are stored, and read from the file: they move with the stream."""
    return bart_like(c, c.max_position_embeddings, before=True, embedding_norm=False)


AT = seq2seq.ENCODER + "self_attn."
MAPS = (*(f"longformer_self_attn.{name}" for name in ("query", "key", "value")), "output")
NAMES = projections(AT, *MAPS, part="encoder")
# Values of both kinds are read by one output, so that they move alike.
GLOBAL = Projections({letter: f"{name}_global" for letter, name in NAMES.items()}, "encoder")


@architecture("led")
def led(c: Config) -> Family:
    """A value's bias is not free in the encoder, as in Longformer."""
    family = bart_like(c, 1, before=False, embedding_norm=True)
    stream = "residual" if c.tied else "encoder_residual"
    maps = GLOBAL.tensors(stream, bias="qkv")
    maps = {n: text.replace("_qk", "_global_qk") for n, text in maps.items() if "output" not in n}
    kept = {name: text for name, text in family.tensors.items() if not name.startswith(AT)}
    places = {part: f"{part}_positions" for part in ("encoder", "decoder")}
    tables = {f"{part}.embed_positions.weight": family.tensors[f"{part}.embed_positions.weight"] for part in places}
    tables = {name: f"{places[name[:7]]} {text.partition(' ')[2]}" for name, text in tables.items()}
    shifts = (key_shift(NAMES["k"], "encoder_qk"), key_shift(GLOBAL["k"], "encoder_global_qk"))
    return replace(
        family.plus(
            axes={"encoder_global_qk": family.axes["encoder_qk"]}
            | {axis: Axis(c.get(f"max_{part}_position_embeddings", 1024)) for part, axis in places.items()}
        ),
        prefix="led.",
        tensors={**kept, **NAMES.tensors(stream), **maps, **tables},
        shifts=(*(shift for shift in family.shifts if not shift.bias.startswith(AT)), *shifts),
    )
