"""The text model of Llama 4: queries and keys normalised without gains behind their positions, which turn planes of
neighbours, and in some layers none; experts that are stored transposed, in some layers."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY, with_names
from symfuse.architectures.experts import expert_axes, mixture, shared_block
from symfuse.groups import Phase, SignedMonomial
from symfuse.spec import Axis

EXPERTS = {
    decoder.MLP + "router.weight": "e residual*",
    decoder.MLP + "experts.gate_up_proj": "e residual* (|ffn| + ffn)",
    decoder.MLP + "experts.down_proj": "e ffn* residual",
}


def _dense_layers(c: Config) -> set[int]:
    layers, step = c.num_hidden_layers, c.size("interleave_moe_layer_step", 1)
    return set(range(layers)).difference(c.entries("moe_layers", int, range(step - 1, layers, step)))


@architecture("llama4_text", tied=False)
def llama4(c: Config) -> Family:
    plane = Phase() if c.get("use_qk_norm", True) else ROTARY
    shared, block = shared_block("shared_expert", c.intermediate_size)
    axes = decoder.axes(c, plane=plane, size=128) | expert_axes(c, c.intermediate_size) | shared
    rest, dense = decoder.PROJECTIONS | decoder.NORMS, _dense_layers(c)
    family = mixture(c, axes, rest, EXPERTS | block, dense=dense, pieces=None)
    if dense:
        family = family.plus(axes={"dense_ffn": Axis(c.size("intermediate_size_mlp", 16384), SignedMonomial(), ("l",))})
    family = decoder.biased(family, c.get("attention_bias", False))
    family = decoder.unturned(family, decoder.without_positions(c, c.size("no_rope_layer_interval", 4)))
    return with_names(decoder.rearranged(family, decoder.NEIGHBOURS), {".mlp.": ".feed_forward."})
