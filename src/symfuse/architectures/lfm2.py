"""LFM2, and its mixture of experts: in the place of attention most layers have a short convolution between two gates,
without any non-linearity; in the others queries and keys are normalised."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import with_names
from symfuse.architectures.experts import EXPERTS, expert_axes, mixture
from symfuse.architectures.state_space import Mixer, with_mixer
from symfuse.groups import Sign, SignedMonomial
from symfuse.spec import Axis

AT = decoder.LAYER + "conv."
NORMS = dict.fromkeys((decoder.BEFORE_ATTENTION, decoder.BEFORE_MLP, "embedding_norm.weight"), "|residual|")
NAMES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm", ".o_proj": ".out_proj",
    "q_norm": "q_layernorm", "k_norm": "k_layernorm", "mlp.gate_proj": "mlp.w1", "mlp.up_proj": "mlp.w3",
    "mlp.down_proj": "mlp.w2", ".mlp.": ".feed_forward.",
}  # fmt: skip
GATED = (
    "gated twice, so linear in one factor: may be reordered, flipped and rescaled; the scales of gates and taps stay"
)
FIELDS = {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}


def _neurons(c: Config) -> int:
    size = c.intermediate_size
    if not c.get("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = 2 * size // 3, c.size("block_multiple_of", 256)
    if c.is_null("block_ffn_dim_multiplier"):
        return size
    return -(-int(c.get("block_ffn_dim_multiplier", 1.0) * size) // multiple) * multiple


def _attention(c: Config) -> tuple[dict[str, Axis], dict[str, str]]:
    axes = decoder.axes(c, plane=Sign()) | {"conv": Axis(c.hidden_size, SignedMonomial(), ("l",), GATED)}
    return axes, decoder.PROJECTIONS | decoder.NORMS_OF_HEADS | NORMS


def _convolutions(c: Config) -> dict[str, str]:
    """Of what is convolved the entries are multiplied by the gates in the first third before, in the next behind."""
    weights = {
        AT + "in_proj.weight": "(|conv| + |conv| + conv) residual*",
        AT + "conv.weight": f"|conv| 1 {c.size('conv_L_cache', 3)}",
        AT + "out_proj.weight": "residual conv*",
    }
    biases = {"in_proj": "(|conv| + |conv| + conv)", "conv": "conv", "out_proj": "residual"}
    return weights | ({f"{AT}{n}.bias": at for n, at in biases.items()} if c.get("conv_bias", False) else {})


def _mixed(c: Config, family: Family) -> Family:
    layers = range(c.num_hidden_layers)
    some = c.entries("full_attn_idxs", int, layers)
    full = decoder.full_layers(c, ["full_attention" if layer in some else "conv" for layer in layers])
    family = with_mixer(family, Mixer(AT, {}, _convolutions(c)), full)
    return with_names(family.plus(reads={"embedding_norm.weight": decoder.READS["norm.weight"]}), NAMES)


@architecture("lfm2", spelt=FIELDS)
def lfm2(c: Config) -> Family:
    axes, tensors = _attention(c)
    axes |= {"ffn": Axis(_neurons(c), SignedMonomial(), ("l",))}
    return _mixed(c, decoder.family(c, axes, tensors | decoder.GATED))


@architecture("lfm2_moe", spelt=FIELDS)
def lfm2_moe(c: Config) -> Family:
    axes, tensors = _attention(c)
    axes |= expert_axes(c, c.moe_intermediate_size)
    experts = EXPERTS | ({decoder.MLP + "expert_bias": "e"} if c.get("use_expert_bias", True) else {})
    dense = range(min(c.get("num_dense_layers", 2), c.num_hidden_layers))
    return _mixed(c, replace(mixture(c, axes, tensors, experts, dense=dense, pieces=("w1", "w3", "w2")), predictors={}))
