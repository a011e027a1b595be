"""Granite's mixtures, with stacks of experts in files too and a block that all tokens pass through, and Granite with
sinks: a logit of each head that takes a share of its attention, and layers without positions."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import with_names
from symfuse.architectures.experts import expert_axes, mixture
from symfuse.architectures.gpt_oss import with_sinks
from symfuse.architectures.llama import llama
from symfuse.errors import SpecError
from symfuse.groups import SignedMonomial
from symfuse.spec import Axis

BLOCK = decoder.LAYER + "block_sparse_moe."
EXPERTS = {
    BLOCK + "router.layer.weight": "e residual*",
    BLOCK + "input_linear.weight": "e (|ffn| + ffn) residual*",
    BLOCK + "output_linear.weight": "e residual ffn*",
}
SHARED = {
    decoder.LAYER + "shared_mlp.input_linear.weight": "(|shared_ffn| + shared_ffn) residual*",
    decoder.LAYER + "shared_mlp.output_linear.weight": "residual shared_ffn*",
}
MEMORY = {
    "moe.router.layer.": "moe.router.", "moe.input_linear.weight": "moe.experts.gate_up_proj",
    "moe.output_linear.weight": "moe.experts.down_proj",
}  # fmt: skip


@architecture("granitemoe", "granitemoeshared", tied=False)
def granitemoe(c: Config) -> Family:
    axes, experts = decoder.axes(c) | expert_axes(c, c.intermediate_size, c.size("num_local_experts", 8)), EXPERTS
    if shared := c.get("shared_intermediate_size", 0):
        axes |= {"shared_ffn": Axis(shared, SignedMonomial(), ("l",))}
        experts = EXPERTS | SHARED
    family = mixture(c, axes, decoder.PROJECTIONS | decoder.NORMS, experts, pieces=None)
    return decoder.biased(family, c.get("attention_bias", False))


def _without_positions(c: Config) -> list[int]:
    layers = c.num_hidden_layers
    thetas = c.get("layer_rope_theta", []) or [1] * layers
    if len(thetas) != layers:
        raise SpecError(
            f"config.json: layer_rope_theta has {len(thetas)} entries, expected one for each layer, {layers}"
        )
    return [layer for layer, theta in enumerate(thetas) if not theta]


@architecture("granite_swa")
def granite_swa(c: Config) -> Family:
    return with_sinks(decoder.unturned(llama(c), _without_positions(c)))


@architecture("granitemoe_swa", tied=False)
def granitemoe_swa(c: Config) -> Family:
    """Its files have the names that the others have in memory."""
    return with_sinks(decoder.unturned(with_names(granitemoe(c), MEMORY), _without_positions(c)))
