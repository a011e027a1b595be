"""Mamba, Falcon Mamba and Mamba-2: layers with nothing but a norm and a mixer. Decoders with such mixers in the place
of most attention, or beside it: Bamba, the hybrids of Granite, Falcon-H1, Jamba."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder, state_space
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import HEADS, OUTPUTS, with_names
from symfuse.architectures.experts import EXPERTS, expert_axes, mixture
from symfuse.architectures.granite_moe import EXPERTS as STACKS
from symfuse.architectures.granite_moe import SHARED
from symfuse.architectures.state_space import (
    MIXER,
    UNCALLED,
    Mixer,
    biased,
    mixer_of,
    step_rank,
    with_last_norm,
    with_mixer,
)
from symfuse.groups import Group, Invertible, Orthogonal, Signed, SignedMonomial
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


AT = decoder.LAYER + "mixer."
NORM = decoder.LAYER + "norm.weight"


def _family(c: Config, mixer: Mixer) -> Family:
    stream = {
        "l": Axis(c.num_hidden_layers),
        "vocab": Axis(c.vocab_size),
        "residual": Axis(c.hidden_size, decoder.SIGNED),
    }
    return Family(
        axes=stream | dict(mixer.axes),
        prefix="backbone.",
        tensors={
            "embeddings.weight": "vocab residual",
            NORM: "|residual|",
            **mixer.tensors,
            "norm_f.weight": "|residual|",
        },
        heads={"causal LM": HEADS["causal LM"]},
        tied={"lm_head.weight": "embeddings.weight"} if c.tied else {},
        outputs=OUTPUTS,
        reads={NORM: mixer.readers, "norm_f.weight": ("last_hidden_state", "lm_head.weight")},
        norm="rms",
    )


def _mamba(c: Config, groups: tuple[Group, Group]) -> Family:
    channels = c.size("intermediate_size", c.size("expand", 2) * c.hidden_size)
    sizes = channels, c.size("state_size", 16), step_rank(c, "time_step_rank")
    kernel, biases = c.size("conv_kernel", 4), biased(c, "use_bias", "use_conv_bias")
    return _family(c, state_space.mamba(c, AT, *sizes, kernel, biases, groups))


@architecture("mamba", uncalled=UNCALLED)
def mamba(c: Config) -> Family:
    return _mamba(c, (Invertible(), SignedMonomial()))


@architecture("falcon_mamba", uncalled=UNCALLED)
def falcon_mamba(c: Config) -> Family:
    """It normalises the step sizes, and what writes and what reads the states, without gains."""
    return _mamba(c, (Orthogonal(), Signed()))


@architecture("mamba2", tied=False)
def mamba2(c: Config) -> Family:
    sizes = c.size("num_heads", 128), c.size("head_dim", 64), c.size("n_groups", 8), c.size("state_size", 128)
    kernel, biases = c.size("conv_kernel", 4), biased(c, "use_bias", "use_conv_bias")
    return _family(c, state_space.mamba2(c, AT, sizes, kernel, biases))
