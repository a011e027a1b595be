"""Decoders with the mixers of Mamba and Mamba-2 in the place of most attention, or beside it: Bamba, the hybrids of
Granite, Falcon-H1, Jamba."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder, state_space
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import with_names
from symfuse.architectures.experts import EXPERTS, expert_axes, mixture
from symfuse.architectures.granite_moe import EXPERTS as STACKS
from symfuse.architectures.granite_moe import SHARED
from symfuse.architectures.state_space import (
    MIXER,
    UNCALLED,
    biased,
    mixer_of,
    step_rank,
    with_last_norm,
    with_mixer,
)
from symfuse.groups import Signed, SignedMonomial
from symfuse.spec import Axis

NAMES = {"post_attention_layernorm": "pre_ff_layernorm", ".mlp.": ".feed_forward."}
LAST = "final_layernorm.weight"


def _gated(c: Config, share: float | None) -> Family:
    family = decoder.family(
        c, decoder.axes(c, share=share) | decoder.gated(c), decoder.PROJECTIONS | decoder.GATED | decoder.NORMS
    )
    family = decoder.biased(family, c.get("attention_bias", False))
    return family.plus(tensors=decoder.MLP_BIASES) if c.get("mlp_bias", False) else family


@architecture("bamba", tied=False)
def bamba(c: Config) -> Family:
    """Half of each head is turned where its config does not say."""
    family = with_mixer(decoder.partly(_gated(c, 0.5)), mixer_of(c), c.entries("attn_layer_indices", int))
    return with_last_norm(with_names(family, NAMES), LAST)


@architecture("falcon_h1", tied=False)
def falcon_h1(c: Config) -> Family:
    """Attention and a mixer side by side in each layer; behind the scan it may have no norm."""
    width = None if c.is_null("mamba_d_ssm") else c.size("mamba_d_ssm", 1024)
    mixer = mixer_of(c, width=width, norm=c.get("mamba_rms_norm", False), output="projectors_bias")
    family = with_mixer(_gated(c, None), mixer)
    return with_last_norm(with_names(family, NAMES), LAST)


@architecture("granitemoehybrid", tied=False, spelt={"layer_types": "layers_block_type"})
def granitemoehybrid(c: Config) -> Family:
    attending = decoder.full_layers(c, ["linear_attention"] * c.num_hidden_layers)
    count = c.get("num_local_experts", 8)
    axes = decoder.axes(c) | {"shared_ffn": Axis(c.size("shared_intermediate_size", 1024), SignedMonomial(), ("l",))}
    axes |= expert_axes(c, c.intermediate_size, c.num_local_experts) if count else {}
    experts = SHARED | (STACKS if count else {})
    family = mixture(c, axes, decoder.PROJECTIONS | decoder.NORMS, experts, pieces=None)
    family = decoder.biased(family, c.get("attention_bias", False))
    if c.get("position_embedding_type") != "rope":
        family = decoder.unturned(family, range(c.num_hidden_layers))
    return with_mixer(family, mixer_of(c), attending)


@architecture("jamba", tied=False, uncalled=UNCALLED)
def jamba(c: Config) -> Family:
    """No positions, mixers of Mamba with norms inside, and experts in each so many layers."""
    layers = range(c.num_hidden_layers)
    attending, sparse = (
        {i for i in layers if i % c.size(f"{kind}_layer_period", period) == c.get(f"{kind}_layer_offset", offset)}
        for kind, period, offset in (("attn", 8, 4), ("expert", 2, 1))
    )
    count = c.size("num_experts", 16)
    dense = set(layers) - (sparse if count > 1 else set())
    experts = {name.replace("mlp.gate.", "mlp.router."): layout for name, layout in EXPERTS.items()}
    axes = decoder.axes(c) | expert_axes(c, c.intermediate_size, count)
    family = mixture(c, axes, decoder.PROJECTIONS | decoder.NORMS, experts, dense=dense)
    family = decoder.unturned(family, layers)
    sizes = c.size("mamba_expand", 2) * c.hidden_size, c.size("mamba_d_state", 16), step_rank(c, "mamba_dt_rank")
    biases = biased(c, "mamba_proj_bias", "mamba_conv_bias")
    mixer = state_space.mamba(c, MIXER, *sizes, c.size("mamba_d_conv", 4), biases, (Signed(), Signed()))
    gains = {"dt": "|rank|", "b": "|states|", "c": "|states|"}
    norms = {MIXER + f"{name}_layernorm.weight": layout for name, layout in gains.items()}
    family = with_mixer(family, replace(mixer, tensors={**mixer.tensors, **norms}), attending)
    return with_last_norm(with_names(family, NAMES), LAST)
