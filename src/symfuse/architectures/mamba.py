"""Mamba, Falcon Mamba and Mamba-2: layers with nothing but a norm and a mixer."""

from __future__ import annotations

from symfuse.architectures import decoder, state_space
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import HEADS, OUTPUTS
from symfuse.architectures.state_space import UNCALLED, Mixer, biased, step_rank
from symfuse.groups import Group, Invertible, Orthogonal, Signed, SignedMonomial
from symfuse.spec import Axis

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
        reads={NORM: (mixer.reader,), "norm_f.weight": ("last_hidden_state", "lm_head.weight")},
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
