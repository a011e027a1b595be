"""Cohere (Command R and A): both blocks side by side behind one LayerNorm without a bias; planes of neighbours. In
the second, positions turn nothing in layers that see all tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY
from symfuse.architectures.experts import EXPERTS, dense_layers, expert_axes, mixture, shared_block
from symfuse.groups import Group, Permutation, SignedMonomial
from symfuse.spec import Axis

NORMS_OF_EACH = {"q": "kv q", "k": "kv"}  # a gain of its own for each head, [heads, size]


NORMS = {name: layout for name, layout in decoder.NORMS.items() if name != decoder.BEFORE_MLP}


def _family(c: Config, plane: Group | None, unturned: Iterable[int] = ()) -> Family:
    """Logits are scaled by a number, which commutes. unturned: the layers without positions."""
    axes = decoder.axes(c, plane=plane, residual=Permutation()) | decoder.gated(c)
    tensors = decoder.PROJECTIONS | decoder.GATED | NORMS
    family = decoder.biased(
        decoder.family(c, axes, tensors, decoder.PARALLEL_READS, "layer"), c.get("attention_bias", False)
    )
    places = decoder.NEIGHBOURS if plane else decoder.WHOLE
    return decoder.rearranged(decoder.unturned(family, unturned), places)


@architecture("cohere")
def cohere(c: Config) -> Family:
    if not c.get("use_qk_norm", False):
        return _family(c, ROTARY)
    family = _family(c, None)
    gains = {
        decoder.ATTENTION + f"{one}_norm.weight": f"({heads}) {family.axes['qk'].size}"
        for one, heads in NORMS_OF_EACH.items()
    }
    return family.plus(tensors=gains)


@architecture("cohere2")
def cohere2(c: Config) -> Family:
    layers, every = c.num_hidden_layers, c.size("sliding_window_pattern", 4)
    return _family(c, ROTARY, decoder.full_layers(c, _sliding(layers, every)))


def _sliding(count: int, every: int) -> list[str]:
    return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(count)]


@architecture("cohere2_moe")
def cohere2_moe(c: Config) -> Family:
    """Of its first layers, which have no experts, positions may turn those too that see all tokens."""
    layers, first = c.num_hidden_layers, c.get("first_k_dense_replace", 0)
    prefix = c.size("prefix_dense_sliding_window_pattern", 1)
    types = _sliding(first, prefix) + _sliding(layers - first, c.size("sliding_window_pattern", 4))
    dense, rms = dense_layers(c, range(first)), c.get("rms_norm_eps") is not None
    count = c.get("num_shared_experts", 0)
    shared, block = shared_block("shared_experts", c.intermediate_size * max(count, 1)) if count else ({}, {})
    axes = decoder.axes(c, plane=ROTARY, residual=decoder.SIGNED if rms else Permutation(), size=128) | shared
    axes |= expert_axes(c, c.intermediate_size, c.size("num_experts", 8))
    rest = decoder.PROJECTIONS | NORMS
    family = mixture(c, axes, rest, EXPERTS | block, dense=dense, norm="rms" if rms else "layer")
    both = (*decoder.READS[decoder.BEFORE_ATTENTION], *family.reads[decoder.BEFORE_MLP])
    reads = {decoder.BEFORE_ATTENTION: both, "norm.weight": family.reads["norm.weight"]}
    if dense:
        size = c.prefix_dense_intermediate_size
        family = family.plus(axes={"dense_ffn": Axis(size, SignedMonomial(), ("l",))})
    family = decoder.biased(replace(family, reads=reads), c.get("attention_bias", False))
    unturned = [layer for layer in decoder.full_layers(c, types) if prefix > 1 or layer not in dense]
    return decoder.rearranged(decoder.unturned(family, unturned), decoder.NEIGHBOURS)
