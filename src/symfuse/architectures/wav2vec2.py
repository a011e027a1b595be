"""wav2vec 2.0, HuBERT and UniSpeech: sounds through convolutions into an encoder, whose positions are a grouped
convolution; norms after each block, or before it. WavLM: the same, with a table of scores by distance that a gate of
each head scales.

That convolution has a block of the stream for each of its groups, and writes through GELU: the stream is reordered by
whole blocks, and inside of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, feed_forward, linear, neurons, norm, norms, placed, projections
from symfuse.errors import SpecError
from symfuse.groups import Invertible, Orthogonal, Permutation, PositiveMonomial, Signed
from symfuse.spec import Axis, Shift

LAYER = "encoder.layers.{l}."
NAMES = projections(LAYER + "attention.", "q_proj", "k_proj", "v_proj", "out_proj")
POSITIONS = "encoder.pos_conv_embed."
NORMED = POSITIONS + "conv.parametrizations.weight.original"
# Names of older versions; a gain for each place in the kernel, and the direction.
LEGACY = {f"pos_conv_embed.conv.weight_{letter}": f"{NORMED[8:]}{n}" for n, letter in enumerate("gv")}
BLOCKS = {"residual*": "(blocks residual*)", "|residual|": "(|blocks| |residual|)", "residual": "(blocks residual)"}
GATE = LAYER + "attention.gru_rel_pos_"
TABLE = "encoder.layers.0.attention.rel_attn_embed.weight"
GROUPED = "positions are a grouped convolution with GELU: reordered inside of each block only"
FLIPPED = "a norm of each channel, over time: reordered, and flipped with its gain"
APART = "the gates of WavLM's heads read the stream in parts, one for each head, in order"


def _blocks(tensors: dict[str, str]) -> dict[str, str]:
    """The tensors with the stream in blocks."""
    out = {}
    for name, text in tensors.items():
        old = next((old for old in BLOCKS if old in text), "")
        out[name] = text.replace(old, BLOCKS[old]) if old else text
    return out


def _convolutions(c: Config, usual: str) -> tuple[dict[str, str], dict[str, Axis], tuple[Shift, ...]]:
    """From sounds to vectors. With a norm of each channel, over time, behind the first convolution, a channel may be
    flipped with its gain, and a bias before that norm is void; norms over channels only let them be reordered."""
    sizes = c.side_by_side(conv_dim=[512] * 7, conv_kernel=[10, 3, 3, 3, 3, 2, 2])
    by_channel, bias = c.get("feat_extract_norm", usual) == "group", c.get("conv_bias", False)
    act = neurons(c.get("feat_extract_activation", "gelu"))
    tensors: dict[str, str] = {}
    axes: dict[str, Axis] = {}
    read = "1"
    for i, (size, kernel) in enumerate(sizes):
        at, axis = f"feature_extractor.conv_layers.{i}.", f"conv{i}_stem"
        flipped = by_channel and i == 0
        axes[axis] = Axis(size, Signed(), why=FLIPPED) if flipped else Axis(size, act if by_channel else Permutation())
        tensors |= {at + "conv.weight": f"{axis} {read} {kernel}"} | ({at + "conv.bias": axis} if bias else {})
        if flipped:
            tensors |= {at + "layer_norm.weight": axis, at + "layer_norm.bias": f"|{axis}|"}
        elif not by_channel:
            tensors |= norm(at + "layer_norm", axis)
        read = f"|{axis}|" if flipped else f"{axis}*"
    shifts = (Shift("feature_extractor.conv_layers.0.conv.bias", "conv0_stem"),) if by_channel and bias else ()
    return tensors, axes, shifts


def _positions(c: Config) -> dict[str, str]:
    """The grouped convolution, whose weight is normed."""
    kernel = c.size("num_conv_pos_embeddings", 128)
    weight = {NORMED + "0": f"1 1 {kernel}", NORMED + "1": f"residual inside* {kernel}"}
    return {POSITIONS + "conv.bias": "residual"} | weight


def _layers(c: Config) -> dict[str, str]:
    feed = LAYER + "feed_forward."
    tensors = {
        **NAMES.tensors(),
        **norm(LAYER + "layer_norm"),
        **feed_forward(feed + "intermediate_dense", feed + "output_dense"),
        **norms(LAYER + "final_layer_norm", "encoder.layer_norm"),
    }
    if c.get("adapter_attn_dim") is not None and c.get("do_stable_layer_norm", False):
        at = LAYER + "adapter_layer."
        tensors |= (
            norm(at + "norm")
            | linear(at + "linear_1", "adapter_ffn")
            | linear(at + "linear_2", "residual", "adapter_ffn*")
        )
    return tensors


def _heads(c: Config, last: str) -> dict[str, Head]:
    """last: the axis of the last convolution. A classifier reads the mean of what its projector puts out."""
    states = {"layer_weights": f"{c.num_hidden_layers + 1}"} if c.get("use_weighted_layer_sum", False) else {}
    projector = linear("projector", "projector") | linear("classifier", "labels", "projector*")
    code = {
        **linear("quantizer.weight_proj", "(books entries)", f"{last}*"),
        "quantizer.codevectors": "1 (books entries) code",
        **linear("project_q", "projected", "(books code*)"),
        **linear("project_hid", "projected"),
    }
    return {
        "CTC": Head(("ForCTC",), linear("lm_head", "vocab")),
        "sequence": Head(("ForSequenceClassification",), projector | states),
        "frames": Head(("ForAudioFrameClassification",), linear("classifier", "labels") | states),
        "pre-training": Head(("ForPreTraining",), code),
    }


def _axes(c: Config) -> dict[str, Axis]:
    groups, books = c.size("num_conv_pos_embedding_groups", 16), c.size("num_codevector_groups", 2)
    axes = block_axes(
        c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, c.get("hidden_act", "gelu")
    )
    return axes | {
        "blocks": Axis(groups, Permutation()),
        "residual": Axis(c.hidden_size // groups, Permutation(), ("blocks",), GROUPED),
        "vocab": Axis(c.size("vocab_size", 32)),
        "labels": Axis(c.labels),
        "projector": Axis(c.size("classifier_proj_size", 256), Invertible()),
        "adapter_ffn": Axis(c.size("adapter_attn_dim", 1), PositiveMonomial(), ("l",)),
        "books": Axis(books, Permutation()),
        "entries": Axis(c.size("num_codevectors_per_group", 320), Permutation(), ("books",)),
        "code": Axis(c.size("codevector_dim", 256) // books, Invertible(), ("books",)),
        "projected": Axis(c.size("proj_codevector_dim", 256), Orthogonal()),
    }


def _family(c: Config, norms: str = "group", positions: Mapping[str, str] | None = None) -> Family:
    """norms: of the first convolutions, where the config does not say. positions: by default one convolution."""
    for option in ("add_adapter", "conv_pos_batch_norm"):
        if c.get(option, False):
            raise SpecError(f"config.json: {option} is true; symfuse declares speech encoders without it")
    front, channels, shifts = _convolutions(c, norms)
    last = list(channels)[-1]
    masked = c.get("mask_time_prob", 0.05) > 0 or c.get("mask_feature_prob", 0.0) > 0
    between = norm("feature_projection.layer_norm", last) if c.get("feat_proj_layer_norm", True) else {}
    encoder = linear("feature_projection.projection", "residual", f"{last}*") | _layers(c)
    encoder |= _positions(c) if positions is None else positions
    encoder |= {"masked_spec_embed": "residual"} if masked else {}
    heads = {label: replace(head, tensors=_blocks(dict(head.tensors))) for label, head in _heads(c, last).items()}
    return Family(
        axes=_axes(c) | channels,
        prefix=c.prefix,
        tensors=front | between | placed(_blocks(encoder), {"inside": "residual"}),
        heads=heads,
        legacy=LEGACY,
        shifts=NAMES.shifts() + shifts,
        outputs={
            "last_hidden_state": "(blocks residual)",
            "extract_features": last,
            "projected_states": "projected",
            "projected_quantized_states": "projected",
        },
        gauges={"feature_projection.projection.weight": "feature_projection.layer_norm.weight"},
    )


@architecture("wav2vec2", "hubert")
def wav2vec2(c: Config) -> Family:
    return _family(c)


def _as_wav2vec2(c: Config, *more: Any) -> Family:
    """Another head of pre-training is not declared. more: as of `_family`."""
    family = _family(c, *more)
    return replace(family, heads={label: head for label, head in family.heads.items() if label != "pre-training"})


@architecture("unispeech", "unispeech-sat")
def unispeech(c: Config) -> Family:
    return _as_wav2vec2(c)


@architecture("data2vec-audio")
def data2vec_audio(c: Config) -> Family:
    """Several convolutions of positions, one after the other, each behind a norm without gains."""
    convolutions = [f"{POSITIONS}layers.{n}.conv." for n in range(c.size("num_conv_pos_embeddings", 5))]
    weight = f"residual inside* {c.size('conv_pos_kernel_size', 19)}"
    positions = {at + "weight": weight for at in convolutions} | {at + "bias": "residual" for at in convolutions}
    return _as_wav2vec2(c, "layer", positions)


@architecture("wavlm")
def wavlm(c: Config) -> Family:
    """Its gates read a part of the stream for each head, so that neither may be reordered."""
    family = _family(c)
    head = family.axes["qk"].size
    still = {name: replace(family.axes[name], group=None, why=APART) for name in ("blocks", "residual", "h")}
    return family.plus(
        axes=still | {"distances": Axis(c.size("num_buckets", 320))},
        tensors={GATE + "const": "1 h 1 1", **linear(GATE + "linear", "8", str(head)), TABLE: "distances h"},
    )
