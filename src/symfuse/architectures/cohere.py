"""Cohere (Command R and A): both blocks side by side behind one LayerNorm without a bias; planes of neighbours. In
the second, positions turn nothing in layers that see all tokens."""

from __future__ import annotations

from collections.abc import Iterable

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY
from symfuse.groups import Group, Permutation

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
    types = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    return _family(c, ROTARY, decoder.full_layers(c, types))
