"""Encoders and decoders that meet in cross-attention: what BART, its relatives and Whisper have in common.

Each stack has axes of its own: `encoder_ffn`, `decoder_ffn`, the heads of both, and those of the cross-attention, whose
queries read the decoder's stream, and whose keys and values read what the encoder puts out.
"""

from __future__ import annotations

from collections.abc import Iterable

from symfuse.architectures.base import Config
from symfuse.architectures.blocks import linear, neurons, norm, of_heads, projections, size_of_head
from symfuse.groups import Group, Invertible, Permutation, Signed
from symfuse.spec import Axis, Shift

Streams = tuple[str, str]  # the axes of the encoder's and of the decoder's residual stream

ENCODER, DECODER = "encoder.layers.{encoder_l}.", "decoder.layers.{decoder_l}."
MAPS = ("q_proj", "k_proj", "v_proj", "out_proj")
ENCODER_SELF = projections(ENCODER + "self_attn.", *MAPS, part="encoder")
DECODER_SELF = projections(DECODER + "self_attn.", *MAPS, part="decoder")
CROSS = projections(DECODER + "encoder_attn.", *MAPS, part="cross")
ENCODER_LAST, DECODER_LAST = "encoder.layer_norm", "decoder.layer_norm"


def attention_axes(
    part: str, heads: int, head: int, per: tuple[str, ...], layers: str, why: str = ""
) -> dict[str, Axis]:
    """The heads of one kind of attention and what is inside of them, in each of `layers`. per, why: of their order."""
    h, qk, v = of_heads(part)
    inside = Axis(head, Invertible(), (layers, h))
    return {h: Axis(heads, Permutation(), per, why), qk: inside, v: inside}


def axes(c: Config) -> dict[str, Axis]:
    """The axes of both stacks, by the fields that BART has, but for the streams. SpecError for heads that cannot be."""
    act = neurons(c.get("activation_function", "gelu"))
    heads = {"encoder": c.encoder_attention_heads, "decoder": c.decoder_attention_heads}
    heads["cross"] = heads["decoder"]
    out = {
        "encoder_l": Axis(c.encoder_layers),
        "decoder_l": Axis(c.decoder_layers),
        "encoder_ffn": Axis(c.encoder_ffn_dim, act, ("encoder_l",)),
        "decoder_ffn": Axis(c.decoder_ffn_dim, act, ("decoder_l",)),
        "vocab": Axis(c.vocab_size),
        "labels": Axis(c.labels),
        "pool": Axis(c.d_model, Signed()),  # tanh is odd
    }
    for part, number in heads.items():
        layers = "encoder_l" if part == "encoder" else "decoder_l"
        out |= attention_axes(part, number, size_of_head(c.d_model, number), (layers,), layers)
    return out


def stream_axes(c: Config, streams: Iterable[str], group: Group | None, why: str = "") -> dict[str, Axis]:
    return {stream: Axis(c.d_model, group, why=why) for stream in streams}


def layers(streams: Streams, bias: str = "qkvo") -> dict[str, str]:
    """The tensors of all layers of both stacks. bias: as in `attention`."""
    encoder, decoder = streams
    return {
        **ENCODER_SELF.tensors(encoder, bias=bias),
        **norm(ENCODER + "self_attn_layer_norm", encoder),
        **linear(ENCODER + "fc1", "encoder_ffn", f"{encoder}*"),
        **linear(ENCODER + "fc2", encoder, "encoder_ffn*"),
        **norm(ENCODER + "final_layer_norm", encoder),
        **DECODER_SELF.tensors(decoder, bias=bias),
        **norm(DECODER + "self_attn_layer_norm", decoder),
        **CROSS.tensors(decoder, encoder, bias=bias),
        **norm(DECODER + "encoder_attn_layer_norm", decoder),
        **linear(DECODER + "fc1", "decoder_ffn", f"{decoder}*"),
        **linear(DECODER + "fc2", decoder, "decoder_ffn*"),
        **norm(DECODER + "final_layer_norm", decoder),
    }


def last_norms(streams: Streams) -> dict[str, str]:
    """Those after the last layers of pre-norm stacks."""
    return norm(ENCODER_LAST, streams[0]) | norm(DECODER_LAST, streams[1])


def shifts(bias: str = "qkvo") -> tuple[Shift, ...]:
    """A key's bias is free, and a value's may move into that of the output, in the cross-attention too."""
    return tuple(shift for one in (ENCODER_SELF, DECODER_SELF, CROSS) for shift in one.shifts(bias=bias))


def encoder_reads(c: Config) -> dict[str, tuple[str, ...]]:
    """What reads the norms of a pre-norm encoder: the last one is read by the keys and values of all of the decoder."""
    cross = (f"{CROSS[name]}.weight".format(decoder_l=at) for at in range(c.decoder_layers) for name in "kv")
    return {
        ENCODER + "self_attn_layer_norm.weight": ENCODER_SELF.readers,
        ENCODER + "final_layer_norm.weight": (ENCODER + "fc1.weight",),
        ENCODER_LAST + ".weight": ("encoder_last_hidden_state", *cross),
    }


def decoder_reads(*heads: str) -> dict[str, tuple[str, ...]]:
    """What reads the norms of a pre-norm decoder. heads: the weights that read the last one."""
    return {
        DECODER + "self_attn_layer_norm.weight": DECODER_SELF.readers,
        DECODER + "encoder_attn_layer_norm.weight": (CROSS["q"] + ".weight",),
        DECODER + "final_layer_norm.weight": (DECODER + "fc1.weight",),
        DECODER_LAST + ".weight": ("last_hidden_state", *heads),
    }


def outputs(streams: Streams) -> dict[str, str]:
    return {"last_hidden_state": streams[1], "encoder_last_hidden_state": streams[0]}
