"""Gated DeltaNet: Qwen3-Next and the text models of Qwen3.5. In most layers attention is linear: queries, keys, values
pass a convolution and SiLU, one by one; each key head serves some value heads, and a norm with one gain for all is
behind these. In the other layers a gate follows attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import placed
from symfuse.architectures.experts import EXPERTS, expert_axes, mixture, shared_block
from symfuse.architectures.qwen_moe import GATE, unrouted_layers
from symfuse.architectures.state_space import Mixer, with_mixer
from symfuse.errors import SpecError
from symfuse.groups import Permutation, Sign, SignedMonomial
from symfuse.spec import Axis

AT = decoder.LAYER + "linear_attn."
CHANNELS = "delta_kv delta_qk + delta_kv delta_qk + delta_kv delta_h delta_v"
TAPS = CHANNELS.replace("qk", "qk*").replace("_v", "_v*")  # each scales what its channel writes
PROJECTIONS = {
    AT + "in_proj_qkv.weight": f"({CHANNELS}) residual*",
    AT + "in_proj_z.weight": "(delta_kv delta_h |delta_v|) residual*",
    AT + "in_proj_b.weight": "(delta_kv delta_h) residual*",
    AT + "in_proj_a.weight": "(delta_kv delta_h) residual*",
}
FUSED = {
    AT + "in_proj_qkvz.weight": "(delta_kv (delta_qk + delta_qk + delta_h delta_v + delta_h |delta_v|)) residual*",
    AT + "in_proj_ba.weight": "(delta_kv (delta_h + delta_h)) residual*",
}
REST = {
    AT + "dt_bias": "(delta_kv delta_h)",
    AT + "A_log": "(delta_kv delta_h)",
    AT + "norm.weight": "|delta_v|",
    AT + "out_proj.weight": "residual (delta_kv delta_h |delta_v|)",
}
QUERIES = {"(kv q c f)": "(kv q (c f + |v|))"}  # with the gate of what a head puts out
LINEAR = "key heads of linear attention, each with the value heads that share it: may be reordered"
SHARING = "value heads of linear attention that share a key head: may be reordered"
CHANNEL = "a convolution of each channel, then SiLU: may be reordered; may be flipped and rescaled against its taps, "
BOTH = CHANNEL + "queries and keys alike"
ALL = CHANNEL + "all heads alike, since they share a gain"
BEHIND_A_GATE = "a gate scales what attention puts out, unit by unit: may be reordered, flipped and rescaled"


def _linear_axes(c: Config) -> dict[str, Axis]:
    keys, values = c.linear_num_key_heads, c.linear_num_value_heads
    if values % keys:
        raise SpecError(
            f"config.json: linear_num_value_heads, {values}, is no multiple of linear_num_key_heads, {keys}"
        )
    return {
        "delta_kv": Axis(keys, Permutation(), ("l",), LINEAR),
        "delta_h": Axis(values // keys, Permutation(), ("l", "delta_kv"), SHARING),
        "delta_qk": Axis(c.linear_key_head_dim, SignedMonomial(), ("l", "delta_kv"), BOTH),
        "delta_v": Axis(c.linear_value_head_dim, SignedMonomial(), ("l",), ALL),
    }


def _attention(c: Config) -> tuple[dict[str, Axis], dict[str, str]]:
    """That of the layers that see all tokens."""
    axes = decoder.axes(c, plane=Sign(), share=0.25, size=256)
    gated = {"v": replace(axes["v"], group=SignedMonomial(), why=BEHIND_A_GATE)}
    biases = decoder.BIASES | decoder.OUTPUT_BIAS if c.get("attention_bias", False) else {}
    tensors = placed(decoder.PROJECTIONS | biases, QUERIES)
    return axes | gated, tensors | decoder.NORMS_OF_HEADS


def _mixed(c: Config, family: Family, projections: Mapping[str, str]) -> Family:
    """A decoder in whose other layers attention is linear. projections: of these."""
    family = decoder.partly_normed(family)
    taps = {AT + "conv1d.weight": f"({TAPS}) 1 {c.linear_conv_kernel_dim}"}
    linear = {**projections, **taps, **REST}
    every = c.size("full_attention_interval", 4)
    usual = [("linear" if (at + 1) % every else "full") + "_attention" for at in range(c.num_hidden_layers)]
    family = with_mixer(family, Mixer(AT, _linear_axes(c), linear), decoder.full_layers(c, usual))
    return replace(family, predictors=decoder.PREDICTORS)


def _mixture(c: Config, dense: set[int]) -> Family:
    attention, tensors = _attention(c)
    shared, block = shared_block("shared_expert", c.shared_expert_intermediate_size)
    axes = attention | shared | expert_axes(c, c.moe_intermediate_size)
    return mixture(c, axes, tensors | decoder.NORMS, EXPERTS | block | GATE, dense=dense, norm="rms+1")


@architecture("qwen3_next", tied=False)
def qwen3_next(c: Config) -> Family:
    return _mixed(c, _mixture(c, unrouted_layers(c)), FUSED)


@architecture("qwen3_5_moe_text", tied=False)
def qwen3_5_moe(c: Config) -> Family:
    return _mixed(c, _mixture(c, set()), PROJECTIONS)


@architecture("qwen3_5_text", tied=False)
def qwen3_5(c: Config) -> Family:
    axes, tensors = _attention(c)
    tensors |= decoder.GATED | decoder.NORMS
    return _mixed(c, decoder.family(c, axes | decoder.gated(c), tensors, norm="rms+1", question="model."), PROJECTIONS)
