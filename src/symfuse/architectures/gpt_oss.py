"""gpt-oss: experts that are stored transposed, with gate and up in turns, clipped; and sinks, a logit of each head that
takes a share of its attention."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.experts import mixture
from symfuse.groups import Permutation
from symfuse.spec import Axis

CLIPPED = "gate and up are clipped, and 1 is added to up: reordered only"
EXPERTS = {
    decoder.MLP + "router.weight": "e residual*",
    decoder.MLP + "router.bias": "e",
    decoder.MLP + "experts.gate_up_proj": "e residual* (ffn 2)",
    decoder.MLP + "experts.gate_up_proj_bias": "e (ffn 2)",
    decoder.MLP + "experts.down_proj": "e ffn* residual",
    decoder.MLP + "experts.down_proj_bias": "e residual",
}


def with_sinks(family: Family) -> Family:
    """The family with a logit of each head beside its scores: what is added to all scores is seen, and what a head puts
    out is no mean of values, so that no bias is free."""
    return replace(family.plus(tensors={decoder.ATTENTION + "sinks": "(kv q)"}), shifts=())


@architecture("gpt_oss", tied=False)
def gpt_oss(c: Config) -> Family:
    axes = decoder.axes(c, size=64) | {
        "e": Axis(c.size("num_local_experts", 128), Permutation(), ("l",)),
        "ffn": Axis(c.intermediate_size, Permutation(), ("l", "e"), CLIPPED),
    }
    family = mixture(c, axes, decoder.PROJECTIONS | decoder.NORMS, EXPERTS, pieces=None)
    return with_sinks(decoder.biased(family, c.get("attention_bias", True)))
