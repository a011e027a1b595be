"""The text models of Gemma 3n and Gemma 4: values are normalised without gains, the last layers read keys and values of
earlier ones, and each layer adds an embedding of its own, through a gate. Gemma 3n has several copies of its stream,
which layers mix by numbers (AltUp, Baykal et al. 2023), and a low-rank map beside attention (Laurel). Gemma 4 may have
heads of other sizes in the layers that see all tokens, and experts beside the feed-forward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import absent, groups_of_heads, neurons, replaced, rotary_axes
from symfuse.architectures.experts import EXPERTS, expert_axes
from symfuse.architectures.gemma import SANDWICH, TANH
from symfuse.errors import SpecError
from symfuse.groups import Invertible, Orthogonal, Permutation, Sign, Signed, SignedMonomial
from symfuse.spec import Axis

Axes = Mapping[str, Axis]
Places = Mapping[str, str]
LAYER = decoder.LAYER
OWN = {
    "embed_tokens_per_layer.weight": "words (l own_ffn)",
    "per_layer_model_projection.weight": "(l own_ffn) residual*",
    "per_layer_projection_norm.weight": "|own_ffn|",
    LAYER + "per_layer_input_gate.weight": "|own_ffn| residual*",
    LAYER + "per_layer_projection.weight": "residual own_ffn*",
    LAYER + "post_per_layer_input_norm.weight": "|residual|",
}
ALTUP_GAINS = ("altup.router_norm.weight", "altup.correct_output_scale", "laurel.post_laurel_norm.weight")
ALTUP = {
    **{f"altup_{one}projections.{{copies}}.weight": "residual residual*" for one in ("", "unembed_")},
    LAYER + "altup.modality_router.weight": "modality_ffn residual*",
    LAYER + "altup.correction_coefs.weight": "streams modality_ffn*",
    LAYER + "altup.prediction_coefs.weight": "(streams streams) modality_ffn*",
    LAYER + "laurel.linear_left.weight": "laurel_latent residual*",
    LAYER + "laurel.linear_right.weight": "residual laurel_latent*",
    **{LAYER + name: "|residual|" for name in ALTUP_GAINS},
}
ROUTED_NORMS = [f"{one}_feedforward_layernorm_{n}" for one, n in (("post", 1), ("post", 2), ("pre", 2))]
ROUTED = {
    LAYER + "router.proj.weight": "e residual*",
    LAYER + "router.scale": "|residual|",
    LAYER + "router.per_expert_scale": "e",
    LAYER + "experts.gate_up_proj": EXPERTS[decoder.MLP + "experts.gate_up_proj"].replace("ffn", "expert_ffn"),
    LAYER + "experts.down_proj": EXPERTS[decoder.MLP + "experts.down_proj"].replace("ffn", "expert_ffn"),
    **{LAYER + f"{one}.weight": "|residual|" for one in ROUTED_NORMS},
}
MIXED = "copies of the stream, which layers mix by numbers: they have one basis; which is which stays"
WITHOUT_GAIN = "values are normalised without a gain: rotated, and not rescaled"
GATED_INPUTS = "one norm with gains, and one table, for all layers: one order for all, and signs"
FULL, WINDOW = "full_attention", "sliding_attention"


def _apart(family: Family, part: str, layers: list[int], axes: Axes, places: Places, *, shared: bool = False) -> Family:
    """The family, in some of whose layers attention has axes of its own, by names behind `part_`. places: pieces of
    layouts that are replaced there. shared: these layers have the keys and values of one of them."""

    def name(axis: str) -> str:
        return f"{part}_{axis}" if axis in axes else axis

    def own(key: str, axis: Axis) -> Axis:
        return replace(axis, per=tuple(name(one) for one in axis.per if one != "l" or key == "q" or not shared))

    moved = {
        template.format(l=layer): re.sub(r"[a-z]+", lambda match: name(match[0]), replaced(text, places))
        for template, text in family.tensors.items()
        for layer in layers
        if template.startswith(decoder.ATTENTION)
    }
    return family.plus(tensors=moved, axes={name(key): own(key, axis) for key, axis in axes.items()})


def _attention(c: Config, size: int, at: str = "") -> dict[str, Axis]:
    """at: the beginning of the name of the field with the number of key/value heads."""
    heads, inside = c.num_attention_heads, ("l", "kv")
    key = "num_key_value_heads"
    groups = groups_of_heads(c, at + key if c.get(at + key) else key, heads)
    return {
        "kv": Axis(groups, Permutation(), ("l",)),
        "q": Axis(heads // groups, Permutation(), inside),
        "v": Axis(size, Orthogonal(), inside, WITHOUT_GAIN),
        **rotary_axes(size, size, inside, Sign()),
    }


def _family(c: Config, ffn: int, attention: Axes) -> Family:
    """What both have."""
    neurons(c.get("hidden_activation", TANH))
    axes = decoder.stream_axes(c) | dict(attention) | {"ffn": Axis(ffn, SignedMonomial(), ("l",))}
    tensors = decoder.PROJECTIONS | decoder.NORMS_OF_HEADS | decoder.GATED | decoder.NORMS | SANDWICH
    tensors |= decoder.BIASES | decoder.OUTPUT_BIAS if c.get("attention_bias", False) else {}
    family = decoder.family(c, axes, tensors, reads={})
    size = c.get("hidden_size_per_layer_input", 256)
    if not size:
        return family
    words = Axis(c.size("vocab_size_per_layer_input", 262144))
    own = {"own_ffn": Axis(size, Signed(), why=GATED_INPUTS), "words": words}
    return family.plus(axes=own, tensors=OWN)


def _sharing(family: Family, types: list[str], shared: int, axes: Mapping[str, Axes], places: Places) -> Family:
    """The family, whose last layers, so many, read the keys and values of the last one of their kind before them.
    axes: those of attention, by kind. places: as of `_apart`, in layers that see all tokens."""
    first = len(types) - shared
    for kind in dict.fromkeys(types[first:]):
        if kind not in types[:first]:
            raise SpecError(f"config.json: the last {shared} layers share keys and values, and none before is a {kind}")
        writer = first - 1 - types[:first][::-1].index(kind)
        layers = [writer, *(layer for layer in range(first, len(types)) if types[layer] == kind)]
        there = places if kind == FULL else {}
        family = _apart(family, f"shared_{kind.split('_')[0]}", layers, axes[kind], there, shared=True)
    written = [n for n in family.tensors if n.startswith(decoder.ATTENTION) and re.search(r"\.[kv]_(proj|norm)\.", n)]
    return family.plus(tensors=absent(written, range(first, len(types))))


@architecture("gemma3n_text")
def gemma3n(c: Config) -> Family:
    c = c.completed()
    if len(widths := {*c.entries("intermediate_size", int)}) != 1:
        raise SpecError("config.json: intermediate_size differs by layer, and that is not declared")
    layers, streams = range(c.num_hidden_layers), c.size("altup_num_inputs", 4)
    attention = _attention(c, c.size("head_dim", 256))
    axes = {
        "copies": Axis(streams - 1),
        "streams": Axis(streams, why=MIXED),
        "modality_ffn": Axis(streams, Signed(), ("l",), "behind tanh: reordered and flipped"),
        "laurel_latent": Axis(c.size("laurel_rank", 64), Invertible(), ("l",)),
    }
    family = _family(c, widths.pop(), attention).plus(axes=axes, tensors=ALTUP)
    types = c.per_layer("layer_types", [WINDOW if (layer + 1) % 5 else FULL for layer in layers])
    return _sharing(family, types, c.get("num_kv_shared_layers", 15), dict.fromkeys(types, attention), {})


@architecture("gemma4_text")
def gemma4(c: Config) -> Family:
    c = c.completed()
    layers, shared = range(c.num_hidden_layers), c.get("num_kv_shared_layers", 0)
    types = c.per_layer("layer_types", [WINDOW if (layer + 1) % 6 else FULL for layer in layers])
    full = [layer for layer in layers if types[layer] == FULL]
    at = f"per_layer_config.{full[0]}." if full and c.get("per_layer_config") else ""
    axes = {WINDOW: _attention(c, c.size("head_dim", 256)), FULL: _attention(c, c.get(at + "head_dim", 512), at)}
    one = c.get("attention_k_eq_v", False)
    places = {"v*": "c* f"} if one else {}  # values are the keys before their norm
    if one:
        axes[FULL].pop("v")
    family = _apart(_family(c, c.intermediate_size, axes[WINDOW]), "full", full, axes[FULL], places)
    family = _sharing(family, types, shared, axes, places)
    values = [name for name in family.tensors if name.startswith(decoder.ATTENTION + "v_proj")]
    family = family.plus(tensors={LAYER + "layer_scalar": "1"} | absent(values, full if one else ()))
    if c.get("enable_moe_block", False):
        experts = expert_axes(c, c.moe_intermediate_size)
        family = family.plus(axes={"e": experts["e"], "expert_ffn": experts["ffn"]}, tensors=ROUTED)
    if c.get("use_double_wide_mlp", False) and shared:
        wide = {
            n.format(l=layer): t.replace("ffn", "wide_ffn")
            for n, t in decoder.GATED.items()
            for layer in layers[-shared:]
        }
        axis = Axis(2 * c.intermediate_size, SignedMonomial(), ("l",))
        family = family.plus(axes={"wide_ffn": axis}, tensors=wide)
    return family
