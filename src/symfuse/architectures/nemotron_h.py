"""Nemotron-H: each layer is a mixer of Mamba-2, or attention without positions, or a feed-forward, or experts."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import linear, neurons, with_names
from symfuse.architectures.experts import expert_axes, in_groups
from symfuse.architectures.state_space import MIXER, biased, mamba2, with_last_norm, with_mixer
from symfuse.errors import SpecError
from symfuse.groups import Invertible
from symfuse.spec import Axis

MOE = decoder.LAYER + "moe."
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
NAMES = {"input_layernorm": "norm", "embed_tokens": "embeddings"} | dict.fromkeys(
    (".self_attn.", ".mamba.", ".mlp.", ".moe."), ".mixer."
)
SPELT = {
    "layer_types": "layers_block_type", "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
}  # fmt: skip


def _block(at: str, ffn: str, *, bias: bool) -> dict[str, str]:
    return linear(at + "up_proj", ffn, bias=bias) | linear(at + "down_proj", "residual", f"{ffn}*", bias=bias)


def _neurons(c: Config, size: int, per: tuple[str, ...] = ("l",)) -> Axis:
    activation = c.get("mlp_hidden_act", "relu2")
    return Axis(size, neurons(activation), per, decoder.SQUARED if activation == "relu2" else "")


def _axes_of_experts(c: Config) -> dict[str, Axis]:
    groups, size = c.size("n_group", 1), c.size("moe_intermediate_size", 7688)
    every = groups <= c.size("topk_group", 1)  # then groups decide nothing
    axes = expert_axes(c, size, c.size("n_routed_experts", 8), 1 if every else groups)
    axes["ffn"] = _neurons(c, size, axes["ffn"].per)
    axes["shared_ffn"] = _neurons(c, c.size("moe_shared_expert_intermediate_size", 7688))
    if c.get("moe_latent_size"):
        axes |= dict.fromkeys(("in_narrow", "out_narrow"), Axis(c.moe_latent_size, Invertible(), ("l",)))
    return axes


def _experts(axes: dict[str, Axis], bias: bool) -> dict[str, str]:
    """They have no gates, and may read and write smaller spaces than the stream."""
    read, written, narrow = "residual", "residual", {}
    if "in_narrow" in axes:
        read, written = "in_narrow", "out_narrow"
        narrow = linear(MOE + "fc1_latent_proj", read, bias=bias)
        narrow |= linear(MOE + "fc2_latent_proj", "residual", f"{written}*", bias=bias)
    experts = {
        MOE + "gate.weight": "e residual*",
        MOE + "gate.e_score_correction_bias": "e",
        MOE + "experts.up_proj": f"e ffn {read}*",
        MOE + "experts.down_proj": f"e {written} ffn*",
    }
    placed = {name: in_groups(layout) if "g" in axes else layout for name, layout in experts.items()}
    return placed | narrow | _block(MOE + "shared_experts.", "shared_ffn", bias=bias)


def _kinds(c: Config) -> list[str]:
    """The kind of each layer; in older configs one letter each, or by other names."""
    older = {"attention": "full_attention", "mamba": "linear_attention"} | LETTERS
    kinds = c.get("layer_types", []) or c.get("hybrid_override_pattern", "") or [*LETTERS.values()]
    kinds = [older.get(str(kind), str(kind)) for kind in kinds]
    if strange := sorted(set(kinds) - set(LETTERS.values())):
        raise SpecError(f"config.json: {strange[0]!r} is no kind of layer; known are {', '.join(LETTERS.values())}")
    return kinds


@architecture("nemotron_h", tied=False, spelt=SPELT)
def nemotron_h(c: Config) -> Family:
    kinds, bias = _kinds(c), c.get("mlp_bias", False)
    of = {kind: {layer for layer, one in enumerate(kinds) if one == kind} for kind in LETTERS.values()}
    axes, tensors = decoder.axes(c, size=128, layers=len(kinds)), dict(decoder.PROJECTIONS)
    if "mlp" in kinds:
        axes["dense_ffn"] = _neurons(c, c.size("intermediate_size", 21504))
        tensors |= _block(decoder.MLP, "dense_ffn", bias=bias)
    if "moe" in kinds:
        axes |= _axes_of_experts(c)
        tensors |= _experts(axes, bias)
    norms = {decoder.BEFORE_ATTENTION: "|residual|", "norm.weight": "|residual|"}
    readers = tuple(name for name, layout in tensors.items() if layout.endswith("residual*"))
    reads = {"norm.weight": decoder.READS["norm.weight"], decoder.BEFORE_ATTENTION: readers}
    family = decoder.family(c, axes, tensors | norms, reads)
    family = decoder.unturned(decoder.biased(family, c.get("attention_bias", False)), range(len(kinds)))
    sizes = (
        c.size("mamba_num_heads", 128),
        c.size("mamba_head_dim", 64),
        c.size("n_groups", 8),
        c.size("ssm_state_size", 128),
    )
    biases = biased(c, "use_bias", "use_conv_bias")
    mixer = mamba2(c, MIXER, sizes, c.size("conv_kernel", 4), biases, activation="mamba_hidden_act")
    family = with_mixer(family, mixer, of["full_attention"], of["linear_attention"])
    family = decoder.only_in(decoder.only_in(family, decoder.MLP, of["mlp"]), MOE, of["moe"])
    stacks = {MOE + f"experts.{one}_proj": (MOE + f"experts.*.{one}_proj.weight",) for one in ("up", "down")}
    family = replace(family, prefix="backbone.", stacks=stacks, legacy={"model.": "backbone."})
    return with_last_norm(with_names(family, NAMES), "norm_f.weight")
