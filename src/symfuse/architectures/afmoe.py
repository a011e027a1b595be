"""AFMoE (Arcee's Trinity): a gate behind attention, norms behind each block as well, and positions only in layers that
see a window of tokens."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.experts import EXPERTS, expert_axes, mixture, shared_block
from symfuse.architectures.qwen3_next import BEHIND_A_GATE
from symfuse.groups import Sign, SignedMonomial

NORMS = {
    decoder.LAYER + f"{one}_layernorm.weight": "|residual|"
    for one in ("input", "post_attention", "pre_mlp", "post_mlp")
}
GATE = {decoder.ATTENTION + "gate_proj.weight": "(kv q |v|) residual*"}
ROUTER = {decoder.MLP + "router.gate.weight": "e residual*", decoder.MLP + "expert_bias": "e"}
STACKS = {name: layout for name, layout in EXPERTS.items() if "experts" in name}


@architecture("afmoe", tied=False)
def afmoe(c: Config) -> Family:
    layers, every = c.num_hidden_layers, c.size("global_attn_every_n_layers", 4)
    types = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    size = c.moe_intermediate_size
    shared, block = shared_block("shared_experts", size * c.size("num_shared_experts", 2))
    axes = decoder.axes(c, plane=Sign(), size=128) | expert_axes(c, size) | shared
    axes |= {"v": replace(axes["v"], group=SignedMonomial(), why=BEHIND_A_GATE)}
    rest = decoder.PROJECTIONS | decoder.NORMS_OF_HEADS | GATE | NORMS | {"norm.weight": "|residual|"}
    rest |= decoder.BIASES | decoder.OUTPUT_BIAS if c.get("attention_bias", False) else {}
    dense = range(min(c.get("num_dense_layers", 1), layers))
    family = replace(mixture(c, axes, rest, ROUTER | STACKS | block, dense=dense), reads={})
    return decoder.unturned(family, decoder.full_layers(c, types), normed=True)
