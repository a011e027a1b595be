"""LongCat-Flash: in each layer two attentions and two feed-forwards in turn, and beside the second half of it experts,
which read what the first half attends to. Some of the experts put out what they read, with the gain of its norm: then
the norms of the stream cannot be folded."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import with_names
from symfuse.architectures.deepseek import latent
from symfuse.architectures.experts import DENSE, stacks_of
from symfuse.groups import Permutation, SignedMonomial
from symfuse.spec import Axis

HALVES = {
    "self_attn.": "self_attn.{half}.", ".mlp.": ".mlps.{half}.",
    **{f"{one}_layernorm.w": f"{one}_layernorm.{{half}}.w" for one in ("input", "post_attention")},
}  # fmt: skip
ROUTER = decoder.MLP + "router.classifier"
EXPERTS = {
    ROUTER + ".weight": "(e + same) residual*",
    decoder.MLP + "router.e_score_correction_bias": "(e + same)",
    decoder.MLP + "experts.gate_up_proj": "(e + same) (neurons + neurons) residual*",
    decoder.MLP + "experts.down_proj": "e residual neurons",
}
STAY = "of experts: one tensor has rows for those too that put out what they read, and these have no neurons"
BEFORE_EXPERTS = decoder.LAYER + "post_attention_layernorm.0.weight"


@architecture("longcat_flash", tied=False)
def longcat_flash(c: Config) -> Family:
    dense = {"dense_ffn": Axis(c.ffn_hidden_size, SignedMonomial(), ("l",))}
    blocks = decoder.family(c, decoder.stream_axes(c, layers=c.num_layers) | dense, DENSE | decoder.NORMS)
    family = with_names(latent(c, blocks), HALVES)
    axes = {
        name: replace(axis, per=("l", "half", *axis.per[1:])) if axis.per else axis
        for name, axis in family.axes.items()
    }
    axes |= {"half": Axis(2), "same": Axis(c.get("zero_expert_num", 256))}
    axes |= {"e": Axis(c.n_routed_experts, Permutation(), ("l",)), "neurons": Axis(c.expert_ffn_hidden_size, why=STAY)}
    first = (*(f"layers.{{l}}.mlps.0.{one}_proj.weight" for one in ("gate", "up")), ROUTER + ".weight")
    reads = {BEFORE_EXPERTS: (*first, decoder.MLP + "experts.gate_up_proj")}
    family = family.plus(axes=axes, tensors=EXPERTS, reads=reads, stacks=stacks_of())
    if axes["same"].size:  # these write what the gain has scaled to the stream: it cannot go into the readers
        return replace(family, reads={gain: r for gain, r in family.reads.items() if "_a_layernorm" in gain})
    return family
