"""What decoders of today have in common: rotary positions, grouped queries, gated neurons, one pre-norm stream."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head
from symfuse.architectures.blocks import HEADS as CAUSAL_HEADS
from symfuse.architectures.blocks import (
    OUTPUTS,
    ROTARY,
    absent,
    groups_of_heads,
    neurons,
    placed,
    rotary_axes,
    size_of_head,
    value_shift,
)
from symfuse.groups import Group, Invertible, Permutation, Sign, Signed, SignedMonomial
from symfuse.spec import Axis, NormKind, Shift

LAYER = "layers.{l}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."
KEY = ATTENTION + "k_proj"
BEFORE_ATTENTION = LAYER + "input_layernorm.weight"
BEFORE_MLP = LAYER + "post_attention_layernorm.weight"

EMBEDDING = {"embed_tokens.weight": "vocab residual"}
# Rotary planes are (i, i + d/2): the two halves of a head, c, and the frequency, f.
PROJECTIONS = {
    ATTENTION + "q_proj.weight": "(kv q c f) residual*",
    ATTENTION + "k_proj.weight": "(kv c* f) residual*",
    ATTENTION + "v_proj.weight": "(kv v) residual*",
    ATTENTION + "o_proj.weight": "residual (kv q v*)",
}
BIASES = {
    ATTENTION + "q_proj.bias": "(kv q c f)",
    ATTENTION + "k_proj.bias": "(kv c* f)",
    ATTENTION + "v_proj.bias": "(kv v)",
}
GATED = {
    MLP + "gate_proj.weight": "|ffn| residual*",
    MLP + "up_proj.weight": "ffn residual*",
    MLP + "down_proj.weight": "residual ffn*",
}
PLAIN = {MLP + "up_proj.weight": "ffn residual*", MLP + "down_proj.weight": "residual ffn*"}
PLAIN_BIASES = {MLP + "up_proj.bias": "ffn", MLP + "down_proj.bias": "residual"}
OUTPUT_BIAS = {ATTENTION + "o_proj.bias": "residual"}
MLP_BIASES = {MLP + "gate_proj.bias": "|ffn|", MLP + "up_proj.bias": "ffn", MLP + "down_proj.bias": "residual"}
# Of queries and keys, one gain for all heads: of a plane only the sign is free.
NORMS_OF_HEADS = {ATTENTION + "q_norm.weight": "(2 f)", ATTENTION + "k_norm.weight": "(2 f)"}
NORMS = {BEFORE_ATTENTION: "|residual|", BEFORE_MLP: "|residual|", "norm.weight": "|residual|"}
HEADS = {
    "causal LM": Head(("ForCausalLM",), {"lm_head.weight": "vocab residual*"}),
    "sequence": Head(("ForSequenceClassification",), {"score.weight": "labels residual*"}),
    "token": Head(("ForTokenClassification",), {"score.weight": "labels residual*", "score.bias": "labels"}),
    "question": CAUSAL_HEADS["question"],
}
READS = {
    BEFORE_ATTENTION: tuple(f"{ATTENTION}{name}_proj.weight" for name in "qkv"),
    BEFORE_MLP: (MLP + "gate_proj.weight", MLP + "up_proj.weight"),
    "norm.weight": ("last_hidden_state", "lm_head.weight", "score.weight", "qa_outputs.weight"),
}
# Attention and feed-forward side by side, behind one norm.
PARALLEL_READS = {name: readers for name, readers in READS.items() if name != BEFORE_MLP}
PARALLEL_READS[BEFORE_ATTENTION] += READS[BEFORE_MLP]
# What layers behind the last one, which predict further tokens, have beside the tensors of a layer.
PREDICTORS = {
    LAYER + "embed_tokens.weight": "vocab residual", LAYER + "shared_head.head.weight": "vocab residual*",
    LAYER + "eh_proj.weight": "residual (residual* + residual*)",
    **{LAYER + f"{name}.weight": "|residual|" for name in ("enorm", "hnorm", "shared_head.norm")},
    "fc.weight": "residual (residual* + residual*)",  # of one that stands apart
    **{f"pre_fc_norm_{name}.weight": "|residual|" for name in ("embedding", "hidden")},
}  # fmt: skip
BUFFERS = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached")

SIGNED = Signed()
# Planes of neighbours, (2i, 2i + 1), in the place of halves; and heads of which positions turn a part, or nothing.
NEIGHBOURS = {"c f": "f c", "c* f": "f c*"}
PARTLY = {"c f": "(c f + p)", "c* f": "(c* f + p*)"}
UNTURNED = {"c f": "p", "c* f": "p*"}
# The same behind an RMSNorm with gains that all heads share: what is not turned has one order n, and signs s by head.
NORMED_PARTLY = {"(2 f)": "(2 f + n)", "c f": "(c f + s n)", "c* f": "(c* f + s n)"}
NORMED_UNTURNED = {"(2 f)": "n", "c f": "s n", "c* f": "s n"}
SHARED_GAINS = "normalised with gains that all heads share: one order for all, and signs"
# Of queries and keys behind a LayerNorm, which mixes all of a head in its mean, one sign for all of it.
WHOLE = {"c f": "qk", "c* f": "qk*"}
SQUARED = "ReLU squared: rescaled by the square of what its input is, which no group here is; reordered only"
NORMED = "a LayerNorm of queries and keys mixes all of a head: its sign is free"


def axes(
    c: Config,
    *,
    plane: Group | None = ROTARY,
    residual: Group = SIGNED,
    share: float | None = None,
    size: int | None = None,
    layers: int | None = None,
) -> dict[str, Axis]:
    """The axes of such a decoder, by the fields that most configs have.

    kv: key/value heads; q: the query heads that share one; c: a rotary plane, on which `plane` acts; p: what is beyond
    a partial rotary factor; without `plane` qk, queries and keys as WHOLE has them. residual: by default what RMSNorm
    with its gains allows. share: the factor where a config has none; None for models that turn whole heads whatever it
    says. size: of a head, where a config has none; by default hidden / heads. layers: by default as many as the config
    says. SpecError for heads that cannot be so.
    """
    heads = c.num_attention_heads
    groups = groups_of_heads(c, "num_key_value_heads", heads)
    if size is None and c.get("head_dim") is None:
        size = size_of_head(c.hidden_size, heads)
    head, inside = c.size("head_dim", size or 0), ("l", "kv")
    turned = head if share is None else int(head * c.rotary_share(share))
    return stream_axes(c, residual, layers) | {
        "kv": Axis(groups, Permutation(), per=("l",)),
        "q": Axis(heads // groups, Permutation(), per=("l", "kv")),
        **({"qk": Axis(head, Sign(), inside, NORMED)} if plane is None else rotary_axes(head, turned, inside, plane)),
        "v": Axis(head, Invertible(), inside),
    }


def stream_axes(c: Config, residual: Group = SIGNED, layers: int | None = None) -> dict[str, Axis]:
    """The axes outside of blocks, and the layers: by default as many as the config says."""
    return {
        "l": Axis(c.num_hidden_layers if layers is None else layers),
        "vocab": Axis(c.vocab_size),
        "labels": Axis(c.labels),
        "residual": Axis(c.hidden_size, residual),
    }


def gated(c: Config, activation: str = "") -> dict[str, Axis]:
    """The neurons of a gated block: up is linear, so that they may be permuted, flipped, rescaled behind any gate.
    activation: by default `hidden_act`."""
    neurons(activation or c.get("hidden_act", "silu"))  # raises unless it acts on each neuron separately
    return {"ffn": Axis(c.intermediate_size, SignedMonomial(), per=("l",))}


def ungated(c: Config, activation: str) -> dict[str, Axis]:
    """The neurons of a block without a gate, by its activation."""
    return {"ffn": Axis(c.intermediate_size, neurons(activation), ("l",), SQUARED if activation == "relu2" else "")}


def gated_block(at: str, ffn: str) -> dict[str, str]:
    """A gated block under another name than MLP, with neurons of its own."""
    return {at + name.removeprefix(MLP): layout.replace("ffn", ffn) for name, layout in GATED.items()}


def norm_biases(norms: Iterable[str]) -> dict[str, str]:
    """The biases of these norms, which are LayerNorms."""
    return {name.removesuffix("weight") + "bias": "residual" for name in norms}


def family(
    c: Config,
    axes: Mapping[str, Axis],
    tensors: Mapping[str, str],
    reads: Mapping[str, tuple[str, ...]] = READS,
    norm: NormKind = "rms",
    question: str = "transformer.",
) -> Family:
    """Such a decoder with the heads that it may have. tensors: those of the base model besides the embedding. question:
    the prefix of the base model under a head for question answering."""
    return Family(
        axes=axes,
        prefix=question if c.class_name.endswith("ForQuestionAnswering") else "model.",
        tensors=EMBEDDING | dict(tensors),
        heads=HEADS,
        tied={"lm_head.weight": "embed_tokens.weight"} if c.tied else {},
        buffers=BUFFERS,
        outputs=OUTPUTS,
        reads=reads,
        norm=norm,
    )


def biased(family: Family, biases: bool, output: bool | None = None) -> Family:
    """The family, if it has them with biases in the projections of attention; that of the output may differ. A value's
    bias may move into the output's."""
    output = biases if output is None else output
    shifts = (value_shift(ATTENTION + "v_proj", ATTENTION + "o_proj"),) if biases and output else ()
    more = (BIASES if biases else {}) | (OUTPUT_BIAS if output else {})
    return replace(family.plus(tensors=more), shifts=(*family.shifts, *shifts))


def rearranged(family: Family, *places: Mapping[str, str]) -> Family:
    """The family with layouts of which pieces are replaced: those of queries and keys in a head."""
    tensors = family.tensors
    for pieces in places:
        tensors = placed(tensors, pieces)
    return family.plus(tensors=tensors)


def partly(family: Family, *places: Mapping[str, str]) -> Family:
    """The family, if it has a part of heads that positions do not turn, with that part, where a key's bias is free.
    places: before."""
    if "p" not in family.axes:
        return rearranged(family, *places)
    free = (Shift(KEY + ".bias", "p*"),) if KEY + ".bias" in family.tensors else ()
    return replace(rearranged(family, PARTLY, *places), shifts=(*family.shifts, *free))


def normed_axes(size: int) -> dict[str, Axis]:
    """Of so many units of queries and keys, behind a norm of each head, that no position turns."""
    return {"n": Axis(size, Permutation(), ("l",), SHARED_GAINS), "s": Axis(1, Sign(), ("l", "kv", "n"), SHARED_GAINS)}


def partly_normed(family: Family) -> Family:
    """As `partly` of queries and keys that are normalised with gains that all heads share."""
    if "p" not in family.axes:
        return family
    axes = {name: axis for name, axis in family.axes.items() if name != "p"} | normed_axes(family.axes["p"].size)
    return replace(rearranged(family, NORMED_PARTLY), axes=axes)


def unturned(family: Family, layers: Iterable[int], *, normed: bool = False) -> Family:
    """The family, in some of whose layers positions turn nothing: queries and keys may move by any invertible map
    there, and a key's bias is free; or where they are normalised, by signs and one order."""
    if not (layers := list(layers)):
        return family
    size = 2 * family.axes["f"].size
    places = NORMED_UNTURNED if normed else UNTURNED
    new = placed(family.tensors, places)
    changed = {name: layout for name, layout in new.items() if layout != family.tensors[name]}
    if len(layers) < family.axes["l"].size:
        changed = {name.format(l=layer): layout for layer in layers for name, layout in changed.items()}
    keys = [name for name in changed if name.endswith("k_proj.bias") and not normed]
    shifts = (*family.shifts, *(Shift(name, "p*") for name in keys))
    free = normed_axes(size) if normed else {"p": Axis(size, Invertible(), ("l", "kv"))}
    return replace(family.plus(tensors=changed, axes=free), shifts=shifts)


def only_in(family: Family, at: str, layers: Collection[int]) -> Family:
    """The family, of which only those layers have the tensors whose names begin so."""
    others = [layer for layer in range(family.axes["l"].size) if layer not in layers]
    return family.plus(tensors=absent([name for name in family.tensors if name.startswith(at)], others))


def with_head_bias(family: Family) -> Family:
    """The family with a bias in the head of its language model."""
    head = family.heads["causal LM"]
    return family.plus(heads={"causal LM": replace(head, tensors={**head.tensors, "lm_head.bias": "vocab"})})


def without_positions(c: Config, every: int) -> list[int]:
    """The layers with a 0 in the list `no_rope_layers` of all, or each of so many; SpecError for a list of another
    length."""
    layers = c.num_hidden_layers
    turned = c.per_layer("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(layers)])
    return [layer for layer in range(layers) if not turned[layer]]


def full_layers(c: Config, types: list[str]) -> list[int]:
    """The layers whose attention sees all tokens, by `layer_types` (in older hybrids called "attention"), or `types`
    where a config has none. SpecError for a list of another length."""
    kinds = c.per_layer("layer_types", types)
    return [layer for layer, kind in enumerate(kinds) if kind in ("full_attention", "attention")]
