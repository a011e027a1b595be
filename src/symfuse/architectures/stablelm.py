"""StableLM: LayerNorm with biases, a part of each head turned; both blocks may be side by side behind one norm."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY
from symfuse.architectures.decoder import (
    ATTENTION,
    BEFORE_MLP,
    BIASES,
    EMBEDDING,
    GATED,
    NORMS,
    PARALLEL_READS,
    PARTLY,
    PROJECTIONS,
    READS,
    WHOLE,
    decoder,
    decoder_axes,
    gated,
    norm_biases,
    placed,
    with_tensors,
)
from symfuse.groups import Permutation
from symfuse.spec import Axis, Shift

# Where positions do not turn it, a key's bias adds one number to all scores of a query, which the softmax ignores.
UNTURNED = (Shift(ATTENTION + "k_proj.bias", "p*"),)
NUMBERED = "each head has a norm under a name with its number"  # why heads stay


@architecture("stablelm", tied=False)
def stablelm(c: Config) -> Family:
    """Where queries and keys are normalised, each head has a norm under a name with its number, and heads stay."""
    normed = c.get("qk_layernorm", False)
    axes = decoder_axes(c, plane=None if normed else ROTARY, residual=Permutation(), share=0.25)
    axes |= gated(c.get("hidden_act", "silu"), c.intermediate_size)
    parallel = c.get("use_parallel_residual", False)
    norms = {name: layout for name, layout in NORMS.items() if not (parallel and name == BEFORE_MLP)}
    attention = PROJECTIONS | (BIASES if c.get("use_qkv_bias", False) else {})
    places = WHOLE if normed else PARTLY if "p" in axes else {}
    tensors = EMBEDDING | placed(attention, places) | GATED | norms | norm_biases(norms)
    family = decoder(c, axes, tensors, PARALLEL_READS if parallel else READS, "layer")
    if normed:
        return _numbered(family)
    return replace(family, shifts=UNTURNED) if "p" in axes else family


def _numbered(family: Family) -> Family:
    """The family with a norm for each head of queries and of keys."""
    axes = dict(family.axes)
    kv, q = axes["kv"].size, axes["q"].size
    axes |= {"kv": Axis(kv, None, why=NUMBERED), "q": Axis(q, None, why=NUMBERED), "m": Axis(kv), "n": Axis(kv * q)}
    norms = {f"{ATTENTION}q_layernorm.norms.{{n}}.weight": f"{axes['qk'].size}"}
    norms |= {f"{ATTENTION}k_layernorm.norms.{{m}}.weight": f"{axes['qk'].size}"}
    return replace(with_tensors(family, norms), axes=axes)
