"""Mixtures of experts: a router, and gated feed-forwards of which each token passes through those that it scores
highest. The experts have no order: they may be permuted, with the router's rows, and the neurons of each are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family
from symfuse.architectures.feed_forward import neurons
from symfuse.groups import Permutation, SignedMonomial
from symfuse.spec import Axis

EXPERTS = {
    decoder.MLP + "gate.weight": "e residual*",  # the router
    decoder.MLP + "experts.gate_up_proj": "e (|ffn| + ffn) residual*",
    decoder.MLP + "experts.down_proj": "e residual ffn*",
}
EXPERTS_READS = decoder.READS | {
    decoder.BEFORE_MLP: (decoder.MLP + "gate.weight", decoder.MLP + "experts.gate_up_proj")
}


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
    at: str = decoder.MLP,
) -> Family:
    """A decoder with experts, which are one stack in memory and in files mostly one tensor for each map of each.
    pieces, at: how files call the maps, and where they have them."""
    gate, up, down = (f"{at}experts.*.{piece}.weight" for piece in pieces)
    stacks = {decoder.MLP + "experts.gate_up_proj": (gate, up), decoder.MLP + "experts.down_proj": (down,)}
    return replace(decoder.family(c, axes, tensors, reads), stacks=stacks)
