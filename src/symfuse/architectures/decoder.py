"""What decoders of today have in common: rotary positions, grouped queries, gated neurons, one pre-norm stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head
from symfuse.architectures.blocks import HEADS as CAUSAL_HEADS
from symfuse.architectures.blocks import (
    OUTPUTS,
    ROTARY,
    groups_of_heads,
    neurons,
    rotary_axes,
    size_of_head,
    value_shift,
)
from symfuse.groups import Group, Invertible, Permutation, Sign, Signed, SignedMonomial
from symfuse.spec import Axis, NormKind

LAYER = "layers.{l}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."
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
BUFFERS = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached")

SIGNED = Signed()
# Planes of neighbours, (2i, 2i + 1), in the place of halves.
NEIGHBOURS = {"c f": "f c", "c* f": "f c*"}
PARTLY = {"c f": "(c f + p)", "c* f": "(c* f + p*)"}
# Of queries and keys behind a LayerNorm, which mixes all of a head in its mean, one sign for all of it.
WHOLE = {"c f": "qk", "c* f": "qk*"}
NORMED = "a LayerNorm of queries and keys mixes all of a head: its sign is free"


def axes(
    c: Config,
    *,
    plane: Group | None = ROTARY,
    residual: Group = SIGNED,
    share: float | None = None,
    size: int | None = None,
) -> dict[str, Axis]:
    """The axes of such a decoder, by the fields that most configs have.

    kv: key/value heads; q: the query heads that share one; c: a rotary plane, on which `plane` acts; p: what is beyond
    a partial rotary factor; without `plane` qk, queries and keys as WHOLE has them. residual: by default what RMSNorm
    with its gains allows. share: the factor where a config has none; None for models that turn whole heads whatever it
    says. size: of a head, where a config has none; by default hidden / heads. SpecError for heads that cannot be so.
    """
    heads = c.num_attention_heads
    groups = groups_of_heads(c, "num_key_value_heads", heads)
    if size is None and c.get("head_dim") is None:
        size = size_of_head(c.hidden_size, heads)
    head, inside = c.size("head_dim", size or 0), ("l", "kv")
    turned = head if share is None else int(head * c.rotary_share(share))
    return {
        "l": Axis(c.num_hidden_layers),
        "vocab": Axis(c.vocab_size),
        "labels": Axis(c.labels),
        "residual": Axis(c.hidden_size, residual),
        "kv": Axis(groups, Permutation(), per=("l",)),
        "q": Axis(heads // groups, Permutation(), per=("l", "kv")),
        **({"qk": Axis(head, Sign(), inside, NORMED)} if plane is None else rotary_axes(head, turned, inside, plane)),
        "v": Axis(head, Invertible(), inside),
    }


def gated(c: Config, activation: str = "") -> dict[str, Axis]:
    """The neurons of a gated block: up is linear, so that they may be permuted, flipped, rescaled behind any gate.
    activation: by default `hidden_act`."""
    neurons(activation or c.get("hidden_act", "silu"))  # raises unless it acts on each neuron separately
    return {"ffn": Axis(c.intermediate_size, SignedMonomial(), per=("l",))}


def norm_biases(norms: Iterable[str]) -> dict[str, str]:
    """The biases of these norms, which are LayerNorms."""
    return {name.removesuffix("weight") + "bias": "residual" for name in norms}


def family(
    c: Config,
    axes: Mapping[str, Axis],
    tensors: Mapping[str, str],
    reads: Mapping[str, tuple[str, ...]] = READS,
    norm: NormKind = "rms",
) -> Family:
    """Such a decoder with the heads that it may have. tensors: those of the base model besides the embedding."""
    return Family(
        axes=axes,
        prefix="model.",
        tensors=EMBEDDING | dict(tensors),
        heads=HEADS,
        tied={"lm_head.weight": "embed_tokens.weight"} if c.tied else {},
        buffers=BUFFERS,
        outputs=OUTPUTS,
        reads=reads,
        norm=norm,
    )


def biased(family: Family, biases: bool) -> Family:
    """The family, if it has them with biases in all projections of attention. That of the values may move into the
    output's."""
    if not biases:
        return family
    shifts = (value_shift(ATTENTION + "v_proj", ATTENTION + "o_proj"),)
    return replace(family.plus(tensors=BIASES | OUTPUT_BIAS), shifts=shifts)


# Mixtures of experts: a router, and gated feed-forwards of which each token passes through those that it scores
# highest. The experts have no order: they may be permuted, with the router's rows, and the neurons of each are its own.
EXPERTS = {
    MLP + "gate.weight": "e residual*",  # the router
    MLP + "experts.gate_up_proj": "e (|ffn| + ffn) residual*",
    MLP + "experts.down_proj": "e residual ffn*",
}
EXPERTS_READS = READS | {BEFORE_MLP: (MLP + "gate.weight", MLP + "experts.gate_up_proj")}


def expert_axes(c: Config, size: int) -> dict[str, Axis]:
    """size: how many neurons each expert has. Files of some releases say `num_local_experts`, others `num_experts`."""
    neurons(c.get("hidden_act", "silu"))  # raises unless it acts on each neuron separately
    count = c.num_experts if c.get("num_local_experts") is None else c.num_local_experts
    return {
        "e": Axis(count, Permutation(), per=("l",)),
        "ffn": Axis(size, SignedMonomial(), per=("l", "e")),
    }


def mixture(
    c: Config,
    axes: Mapping[str, Axis],
    tensors: Mapping[str, str],
    reads: Mapping[str, tuple[str, ...]] = EXPERTS_READS,
    pieces: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    at: str = MLP,
) -> Family:
    """A decoder with experts, which are one stack in memory and in files mostly one tensor for each map of each.
    pieces, at: how files call the maps, and where they have them."""
    gate, up, down = (f"{at}experts.*.{piece}.weight" for piece in pieces)
    stacks = {MLP + "experts.gate_up_proj": (gate, up), MLP + "experts.down_proj": (down,)}
    return replace(family(c, axes, tensors, reads), stacks=stacks)
