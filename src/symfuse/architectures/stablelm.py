"""StableLM: LayerNorm with biases, a part of each head turned; both blocks may be side by side behind one norm."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, architecture
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
    decoder,
    decoder_axes,
    gated,
    norm_biases,
    placed,
)
from symfuse.errors import SpecError
from symfuse.groups import Permutation
from symfuse.spec import Shift

# Where positions do not turn it, a key's bias adds one number to all scores of a query, which the softmax ignores.
UNTURNED = (Shift(ATTENTION + "k_proj.bias", "p*"),)


@architecture("stablelm", tied=False)
def stablelm(c: Config) -> Family:
    if c.get("qk_layernorm", False):
        raise SpecError(
            "config.json: a stablelm with qk_layernorm has a norm for each head, under a name with its number, which "
            "symfuse does not declare; only models without (qk_layernorm: false) can be read"
        )
    axes = decoder_axes(c, residual=Permutation(), share=0.25)
    axes |= gated(c.get("hidden_act", "silu"), c.intermediate_size)
    parallel = c.get("use_parallel_residual", False)
    norms = {name: layout for name, layout in NORMS.items() if not (parallel and name == BEFORE_MLP)}
    attention = PROJECTIONS | (BIASES if c.get("use_qkv_bias", False) else {})
    tensors = EMBEDDING | placed(attention, PARTLY if "p" in axes else {}) | GATED | norms | norm_biases(norms)
    family = decoder(c, axes, tensors, PARALLEL_READS if parallel else READS, "layer")
    return replace(family, shifts=UNTURNED) if "p" in axes else family
