"""Mixers that scan a sequence by a linear recurrence whose factors depend on the input (state space models): those of
Mamba and of Mamba-2, and decoders that have them in the place of attention, or beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family
from symfuse.architectures.blocks import neurons
from symfuse.errors import SpecError
from symfuse.groups import Group, Invertible, Permutation, SignedMonomial
from symfuse.spec import Axis

UNCALLED = ("dt_proj",)  # of Mamba: its weight is multiplied with, and its bias added later
MIXER = decoder.LAYER + "mamba."
ACTIVATED = "a non-linearity acts on each, before the scan: reordered only"
SHARED = "heads of one block share what writes and what reads their states: reordered as a whole"
STATES = "each is written, decays and is read by itself, and between no non-linearity: reordered, flipped, rescaled"
# Of Mamba-2: the channels of all heads, in blocks that share their states; and the states of all blocks.
CHANNELS, HEADS, BLOCKS = "ssm_m ssm_h scanned", "ssm_m ssm_h", "ssm_m states"


@dataclass(frozen=True)
class Mixer:
    """The axes and the tensors of one kind of mixer. at: what the names of its tensors begin with."""

    at: str
    axes: Mapping[str, Axis]
    tensors: Mapping[str, str]

    @property
    def readers(self) -> tuple[str, ...]:
        """The weights that read the stream."""
        return tuple(name for name, layout in self.tensors.items() if layout.endswith(" residual*"))


def biased(c: Config, maps: str, convolution: str, output: str = "") -> set[str]:
    """The parts of a mixer with a bias, by the fields that say so: of its maps of the stream, of its convolution, and
    of the map of its output, if it has a field of its own."""
    has = {"in_proj": c.get(maps, False), "out_proj": c.get(output or maps, False), "conv1d": c.get(convolution, True)}
    return {name for name, bias in has.items() if bias}


def mamba(
    c: Config,
    at: str,
    channels: int,
    states: int,
    rank: int,
    kernel: int,
    biases: Collection[str],
    groups: tuple[Group, Group] = (Invertible(), SignedMonomial()),
) -> Mixer:
    """That of Mamba (Gu & Dao 2023). groups: of the space through which the step sizes pass, of that rank, and of the
    states."""
    neurons(c.get("hidden_act", "silu"))
    axes = {
        "scanned": Axis(channels, Permutation(), ("l",), ACTIVATED),
        "rank": Axis(rank, groups[0], ("l",)),
        "states": Axis(states, groups[1], ("l",), STATES if groups[1] == SignedMonomial() else ""),
    }
    tensors = {
        "in_proj.weight": "(scanned + scanned) residual*",  # what is scanned, and its gate
        "conv1d.weight": f"scanned 1 {kernel}",
        "x_proj.weight": "(rank + states + states*) scanned*",
        "dt_proj.weight": "scanned rank*",
        "dt_proj.bias": "scanned",
        "A_log": "scanned |states|",
        "D": "scanned",
        "out_proj.weight": "residual scanned*",
    }
    more = {"in_proj": "(scanned + scanned)", "conv1d": "scanned", "out_proj": "residual"}
    return _mixer(at, axes, tensors, more, biases)


def mamba2(
    c: Config,
    at: str,
    sizes: tuple[int, int, int, int],
    kernel: int,
    biases: Collection[str],
    *,
    norm: bool = True,
    activation: str = "hidden_act",
) -> Mixer:
    """That of Mamba-2 (Dao & Gu 2024). sizes: the number of heads, the channels of each, the number of blocks of heads
    that share their states, and of states. SpecError if heads cannot be so. norm: whether there is one behind the scan.
    """
    heads, size, blocks, states = sizes
    neurons(c.get(activation, "silu"))
    if heads % blocks:
        raise SpecError(f"config.json: the number of heads of a mixer, {heads}, is no multiple of its groups, {blocks}")
    axes = {
        "ssm_m": Axis(blocks, Permutation(), ("l",), SHARED),
        "ssm_h": Axis(heads // blocks, Permutation(), ("l", "ssm_m"), SHARED),
        "scanned": Axis(size, Permutation(), ("l", "ssm_m", "ssm_h"), ACTIVATED),
        "states": Axis(states, Permutation(), ("l", "ssm_m"), ACTIVATED),
    }
    convolved = f"{CHANNELS} + {BLOCKS} + {BLOCKS}"  # with what writes the states, and what reads them
    whole = f"({CHANNELS} + {convolved} + {HEADS})"  # with the gate and the step sizes
    tensors = {
        "in_proj.weight": f"{whole} residual*",
        "conv1d.weight": f"({convolved}) 1 {kernel}",
        **dict.fromkeys(("dt_bias", "A_log", "D"), f"({HEADS})"),
        **({"norm.weight": f"({CHANNELS})"} if norm else {}),
        "out_proj.weight": f"residual ({CHANNELS}*)",
    }
    return _mixer(at, axes, tensors, {"in_proj": whole, "conv1d": f"({convolved})", "out_proj": "residual"}, biases)


def _mixer(
    at: str, axes: Mapping[str, Axis], tensors: Mapping[str, str], more: Mapping[str, str], biases: Collection[str]
) -> Mixer:
    of_biases = {f"{name}.bias": layout for name, layout in more.items() if name in biases}
    return Mixer(at, axes, {at + name: layout for name, layout in {**tensors, **of_biases}.items()})


def mixer_of(c: Config, *, width: int | None = None, norm: bool = True, output: str = "") -> Mixer:
    """That of Mamba-2 by the fields `mamba_…`, which most hybrids have. width: of all heads, where the config does not
    say the size of one. output: as of `biased`."""
    heads = c.size("mamba_n_heads", 128)
    width = c.size("mamba_expand", 2) * c.hidden_size if width is None else width
    size = width // heads if c.get("mamba_d_head") in (None, "auto") else c.mamba_d_head
    sizes = (heads, size, c.size("mamba_n_groups", 1), c.size("mamba_d_state", 256))
    biases = biased(c, "mamba_proj_bias", "mamba_conv_bias", output)
    return mamba2(c, MIXER, sizes, c.size("mamba_d_conv", 4), biases, norm=norm)


def step_rank(c: Config, key: str) -> int:
    """The rank of the step sizes of Mamba, by default a sixteenth of the stream."""
    return -(-c.hidden_size // 16) if c.get(key) in (None, "auto") else c.size(key, 1)


def with_mixer(
    family: Family, mixer: Mixer, attending: Iterable[int] | None = None, scanning: Iterable[int] | None = None
) -> Family:
    """A decoder that has such mixers behind the norms before its attention. attending: the layers with attention, by
    default all of them, which have both; scanning: those with mixers, by default the others."""
    reads = {decoder.BEFORE_ATTENTION: (*family.reads[decoder.BEFORE_ATTENTION], *mixer.readers)}
    family = family.plus(axes=mixer.axes, tensors=mixer.tensors, reads=reads)
    if attending is None:
        return family
    attending = set(attending)
    others = set(range(family.axes["l"].size)) - attending if scanning is None else set(scanning)
    return decoder.only_in(decoder.only_in(family, decoder.ATTENTION, attending), mixer.at, others)


def with_last_norm(family: Family, name: str) -> Family:
    """The family with another name for the norm behind its last layer."""
    return family.mapped(lambda one: name if one == "norm.weight" else one)
