"""GLM 4: gate and up in one tensor, planes of neighbours in a part of each head; and the mixtures of GLM 4.5, Solar
and Sarvam, whose planes are halves."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY, with_names
from symfuse.architectures.experts import deepseek, dense_layers
from symfuse.architectures.llama import FUSED, FUSED_READS
from symfuse.groups import Sign

FUSED_MLP = {name: layout for name, layout in FUSED.items() if name.startswith(decoder.MLP)}
READS = FUSED_READS | {decoder.BEFORE_ATTENTION: decoder.READS[decoder.BEFORE_ATTENTION]}
POST_NORMS = {decoder.LAYER + f"post_{block}_layernorm.weight": "|residual|" for block in ("self_attn", "mlp")}
SARVAM = {
    "embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "self_attn.": "attention.", "e_score_correction_bias": "expert_bias",
}  # fmt: skip


@architecture("glm", tied=False)
def glm(c: Config) -> Family:
    axes = decoder.axes(c, share=0.5, size=128) | decoder.gated(c)
    family = decoder.family(c, axes, decoder.PROJECTIONS | FUSED_MLP | decoder.NORMS, READS)
    return decoder.partly(decoder.biased(family, c.get("attention_bias", False), False), decoder.NEIGHBOURS)


@architecture("glm4", tied=False)
def glm4(c: Config) -> Family:
    """With norms behind each block as well, so that none is folded."""
    return replace(glm(c).plus(tensors=POST_NORMS), reads={})


def _mixture(c: Config, first: int, share: float | None, normed: bool) -> Family:
    """first: the number of dense layers before those with experts."""
    attention = decoder.PROJECTIONS | (decoder.NORMS_OF_HEADS if normed else {})
    axes = decoder.axes(c, plane=Sign() if normed else ROTARY, share=share)
    family = deepseek(c, axes, attention, dense_layers(c, range(first)))
    family = decoder.biased(family, c.get("attention_bias", False), False)
    return decoder.partly_normed(family) if normed else decoder.partly(family)


@architecture("glm4_moe", tied=False, example={"head_dim": 128})
def glm4_moe(c: Config) -> Family:
    return _mixture(c, c.get("first_k_dense_replace", 1), 0.5, c.get("use_qk_norm", False))


@architecture("sarvam_moe", tied=False)
def sarvam_moe(c: Config) -> Family:
    """Its files have names of their own, and queries, keys and values in one tensor."""
    family = _mixture(c, c.get("first_k_dense_replace", 1), 1.0, c.get("use_qk_norm", True))
    fused = {}
    for end in (" residual*", ""):  # weights, biases
        names = [f"{decoder.ATTENTION}{one}_proj.{'weight' if end else 'bias'}" for one in "qkv"]
        if names[0] in family.tensors:
            layouts = (family.tensors[name].removesuffix(end).strip("()") for name in names)
            fused[names[0].replace("q_proj", "query_key_value")] = f"({' + '.join(layouts)}){end}"
    apart = tuple(f"{decoder.ATTENTION}{one}_proj." for one in "qkv")
    rest = {name: layout for name, layout in family.tensors.items() if not name.startswith(apart)}
    reads = {**family.reads, decoder.BEFORE_ATTENTION: (decoder.ATTENTION + "query_key_value.weight",)}
    return with_names(replace(family, tensors=rest | fused, reads=reads), SARVAM)


@architecture("solar_open", tied=False)
def solar_open(c: Config) -> Family:
    return _mixture(c, 0, None, normed=False)
