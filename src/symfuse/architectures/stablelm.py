"""StableLM: LayerNorm with biases, a part of each head turned; both blocks may be side by side behind one norm."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY, placed
from symfuse.groups import Permutation
from symfuse.spec import Axis, Shift

# Where positions do not turn it, a key's bias adds one number to all scores of a query, which the softmax ignores.
UNTURNED = (Shift(decoder.ATTENTION + "k_proj.bias", "p*"),)
NUMBERED = "each head has its own norm, whose name contains the head's number"  # why heads stay


@architecture("stablelm", tied=False)
def stablelm(c: Config) -> Family:
    """Where queries and keys are normalised, each head has a norm under a name with its number, and heads stay."""
    normed = c.get("qk_layernorm", False)
    axes = decoder.axes(c, plane=None if normed else ROTARY, residual=Permutation(), share=0.25)
    axes |= decoder.gated(c)
    parallel = c.get("use_parallel_residual", False)
    norms = {name: layout for name, layout in decoder.NORMS.items() if not (parallel and name == decoder.BEFORE_MLP)}
    attention = decoder.PROJECTIONS | (decoder.BIASES if c.get("use_qkv_bias", False) else {})
    places = decoder.WHOLE if normed else decoder.PARTLY if "p" in axes else {}
    tensors = placed(attention, places) | decoder.GATED | norms | decoder.norm_biases(norms)
    family = decoder.family(c, axes, tensors, decoder.PARALLEL_READS if parallel else decoder.READS, "layer")
    if normed:
        return _numbered(family)
    return replace(family, shifts=UNTURNED) if "p" in axes else family


def _numbered(family: Family) -> Family:
    """The family with a norm for each head of queries and of keys."""
    axes = dict(family.axes)
    kv, q = axes["kv"].size, axes["q"].size
    axes |= {"kv": Axis(kv, None, why=NUMBERED), "q": Axis(q, None, why=NUMBERED), "m": Axis(kv), "n": Axis(kv * q)}
    norms = {f"{decoder.ATTENTION}q_layernorm.norms.{{n}}.weight": f"{axes['qk'].size}"}
    norms |= {f"{decoder.ATTENTION}k_layernorm.norms.{{m}}.weight": f"{axes['qk'].size}"}
    return family.plus(tensors=norms, axes=axes)
