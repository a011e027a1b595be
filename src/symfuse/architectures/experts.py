"""Mixtures of experts: a router, and gated feed-forwards of which each token passes through those that it scores
highest. The experts have no order: they may be permuted, with the router's rows, and the neurons of each are its own.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family
from symfuse.architectures.blocks import absent, neurons
from symfuse.errors import SpecError
from symfuse.groups import Permutation, SignedMonomial
from symfuse.spec import Axis, NormKind

EXPERTS = {
    decoder.MLP + "gate.weight": "e residual*",  # the router
    decoder.MLP + "experts.gate_up_proj": "e (|ffn| + ffn) residual*",
    decoder.MLP + "experts.down_proj": "e residual ffn*",
}
# What is added to the scores by which experts are selected, where DeepSeek has it.
CORRECTION = {decoder.MLP + "gate.e_score_correction_bias": "e"}
PIECES = ("gate_proj", "up_proj", "down_proj")
DENSE = decoder.gated_block(decoder.MLP, "dense_ffn")  # of layers without experts


def expert_axes(c: Config, size: int, count: int | None = None, groups: int = 1) -> dict[str, Axis]:
    """size: how many neurons each expert has. count: of experts; files of some releases say `num_local_experts`, others
    `num_experts`. groups: of which some are selected first: experts stay together."""
    neurons(c.get("hidden_act", "silu"))  # whether it acts on each by itself
    if count is None:
        count = c.num_experts if c.get("num_local_experts") is None else c.num_local_experts
    if groups == 1:
        return {"e": Axis(count, Permutation(), ("l",)), "ffn": Axis(size, SignedMonomial(), ("l", "e"))}
    if count % groups:
        raise SpecError(f"config.json: the number of experts, {count}, is no multiple of n_group, {groups}")
    return {
        "g": Axis(groups, Permutation(), ("l",)),
        "e": Axis(count // groups, Permutation(), ("l", "g")),
        "ffn": Axis(size, SignedMonomial(), ("l", "g", "e")),
    }


def shared_block(name: str, size: int) -> tuple[dict[str, Axis], dict[str, str]]:
    """A gated block of that name, with so many neurons, that all tokens pass through: its axis and its tensors."""
    axes = {"shared_ffn": Axis(size, SignedMonomial(), per=("l",))}
    return axes, decoder.gated_block(f"{decoder.MLP}{name}.", "shared_ffn")


def mixture(
    c: Config,
    axes: Mapping[str, Axis],
    rest: Mapping[str, str],
    experts: Mapping[str, str] = EXPERTS,
    *,
    dense: Collection[int] = (),
    pieces: tuple[str, str, str] | None = PIECES,
    at: str = decoder.MLP,
    norm: NormKind = "rms",
    question: str = "model.",
) -> Family:
    """A decoder with experts, which are one stack in memory and in files mostly one tensor for each map of each.

    rest: tensors outside of the feed-forward; experts: those in it; dense: the layers that have an ordinary one.
    pieces, at: how files call the maps, and where they have them; None for those that have stacks.
    """
    sparse = {name: in_groups(layout) for name, layout in experts.items()} if "g" in axes else dict(experts)
    tensors, axes = {**rest, **sparse}, dict(axes)
    if dense:
        axes |= {"dense_ffn": Axis(c.intermediate_size, SignedMonomial(), per=("l",))}
        others = [layer for layer in range(c.num_hidden_layers) if layer not in dense]
        tensors |= DENSE | absent(sparse, dense) | absent(DENSE, others)
    readers = tuple(name for name, layout in (sparse | DENSE).items() if "residual*" in layout)
    family = decoder.family(c, axes, tensors, decoder.READS | {decoder.BEFORE_MLP: readers}, norm, question)
    return replace(family, stacks=stacks_of(pieces, at) if pieces else {}, predictors=decoder.PREDICTORS)


def stacks_of(pieces: tuple[str, str, str] = PIECES, at: str = decoder.MLP) -> dict[str, tuple[str, ...]]:
    """The stacks of experts, and what of them is one tensor in files. pieces, at: as of `mixture`."""
    gate, up, down = (f"{at}experts.*.{piece}.weight" for piece in pieces)
    return {decoder.MLP + "experts.gate_up_proj": (gate, up), decoder.MLP + "experts.down_proj": (down,)}


def in_groups(layout: str) -> str:
    """The layout of a tensor of experts that stay in groups."""
    return "(g e)" + layout[1:] if layout.split(" ")[0] == "e" else layout


def deepseek(
    c: Config,
    axes: Mapping[str, Axis],
    attention: Mapping[str, str],
    dense: Collection[int],
    *,
    names: tuple[str, str] = ("n_routed_experts", "n_shared_experts"),
    correction: Mapping[str, str] = CORRECTION,
    grouped: bool = True,
) -> Family:
    """A decoder with the experts of DeepSeek-V3: groups of them, and a block that all tokens pass through. axes: of its
    stream and its attention. names: of the fields with the number of experts, and with the size of that block in
    experts. grouped: whether some groups are selected first."""
    groups = c.size("n_group", 1)
    every = not grouped or groups <= c.size("topk_group", 1)  # then groups decide nothing
    count = getattr(c, names[0]) if c.get("num_local_experts") is None else c.num_local_experts
    shared, block = shared_block("shared_experts", c.moe_intermediate_size * c.size(names[1], 1))
    axes = {**axes, **shared} | expert_axes(c, c.moe_intermediate_size, count, 1 if every else groups)
    return mixture(c, axes, {**attention, **decoder.NORMS}, EXPERTS | dict(correction) | block, dense=dense)


def dense_layers(c: Config, first: Container[int]) -> set[int]:
    """The layers without experts: those that `mlp_layer_types` says to be dense, or the first ones."""
    layers = c.num_hidden_layers
    types = c.per_layer("mlp_layer_types", ["dense" if layer in first else "sparse" for layer in range(layers)])
    return {layer for layer, kind in enumerate(types) if kind == "dense"}
