"""Llama and what has its form: Mistral, SmolLM, Yi, Granite, SmolLM3, Qwen2, Qwen3, EXAONE 3, ERNIE 4.5, Helium …;
Phi-3 and Phi-4, with queries, keys and values in one tensor, and gate and up in another; EuroBERT, without a causal
mask, and with the heads of an encoder."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.bert import TOKEN
from symfuse.architectures.blocks import ROTARY, linear, neurons, placed, with_names
from symfuse.groups import Group, Sign
from symfuse.spec import Axis

# The names of EXAONE 3's files.
EXAONE = {
    "embed_tokens": "wte", "layers.": "h.", "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn.": "attn.attention.", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
    "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj", "norm.": "ln_f.",
}  # fmt: skip


def _family(c: Config, plane: Group = ROTARY, question: str = "transformer.", size: int | None = None) -> Family:
    """question: as of `decoder.family`. size: as of `decoder.axes`."""
    axes = decoder.axes(c, plane=plane, size=size) | decoder.gated(c)
    return decoder.family(c, axes, decoder.PROJECTIONS | decoder.GATED | decoder.NORMS, question=question)


@architecture("internlm3", tied=False, spelt={"attention_bias": "qkv_bias", "mlp_bias": "bias"})
@architecture("llama", "granite", "iquestcoder", tied=False)
def llama(c: Config) -> Family:
    """What Granite multiplies by numbers commutes with all of it."""
    return _biased(c, _family(c), c.get("attention_bias", False))


def _biased(c: Config, family: Family, attention: bool, output: bool | None = None) -> Family:
    family = decoder.biased(family, attention, output)
    return family.plus(tensors=decoder.MLP_BIASES) if c.get("mlp_bias", False) else family


@architecture("seed_oss", tied=False)
def seed_oss(c: Config) -> Family:
    return _biased(c, _family(c, size=128), c.get("attention_bias", True), c.get("attention_out_bias", False))


@architecture("helium", tied=False)
def helium(c: Config) -> Family:
    family = _biased(c, _family(c, size=128), c.get("attention_bias", False), False)
    return decoder.rearranged(family, decoder.NEIGHBOURS)


@architecture("ernie4_5")
def ernie4_5(c: Config) -> Family:
    biases = c.get("use_bias", False)
    family = decoder.biased(_family(c, size=128), biases)
    family = family.plus(tensors=decoder.MLP_BIASES) if biases else family
    return decoder.rearranged(family, decoder.NEIGHBOURS)


@architecture("exaone", tied=False, spelt={"num_hidden_layers": "num_layers", "hidden_act": "activation_function"})
def exaone(c: Config) -> Family:
    """EXAONE 3 is a Llama under other names."""
    return with_names(llama(c), EXAONE, "transformer.")


@architecture("smollm3")
def smollm3(c: Config) -> Family:
    """In some layers positions turn nothing."""
    return decoder.unturned(llama(c), decoder.without_positions(c, c.size("no_rope_layer_interval", 4)))


@architecture("mistral", "ministral3", tied=False)
def mistral(c: Config) -> Family:
    return _family(c, question="model.")


@architecture("ministral", "cwm", tied=False)
def ministral(c: Config) -> Family:
    return _family(c)


@architecture("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", tied=False)
def qwen2(c: Config) -> Family:
    return _family(c).plus(tensors=decoder.BIASES)


@architecture("qwen3", "qwen3_vl_text", tied=False)
def qwen3(c: Config) -> Family:
    family = _family(c, Sign(), size=128).plus(tensors=decoder.NORMS_OF_HEADS)
    return decoder.biased(family, c.get("attention_bias", False))


FUSED = {
    decoder.ATTENTION + "qkv_proj.weight": "(kv q c f + kv c* f + kv v) residual*",
    decoder.ATTENTION + "o_proj.weight": "residual (kv q v*)",
    decoder.MLP + "gate_up_proj.weight": "(|ffn| + ffn) residual*",
    decoder.MLP + "down_proj.weight": "residual ffn*",
}
FUSED_READS = decoder.READS | {
    decoder.BEFORE_ATTENTION: (decoder.ATTENTION + "qkv_proj.weight",),
    decoder.BEFORE_MLP: (decoder.MLP + "gate_up_proj.weight",),
}


@architecture("phi3", tied=False)
def phi3(c: Config) -> Family:
    axes = decoder.axes(c, share=1.0) | decoder.gated(c)
    return decoder.family(
        c, axes, (placed(FUSED, decoder.PARTLY) if "p" in axes else FUSED) | decoder.NORMS, FUSED_READS
    )


@architecture("eurobert", tied=False)
def eurobert(c: Config) -> Family:
    family = llama(c)
    # Of the two heads that have a classifier, one reads the stream by it.
    first = "classifier" if c.class_name.endswith(TOKEN.classes) else "dense"
    pooled = linear("dense", "pre") | linear("classifier", "labels", "pre*")
    return replace(
        family,
        axes={**family.axes, "pre": Axis(c.hidden_size, neurons("gelu"))},
        heads={
            "masked LM": Head(("ForMaskedLM",), linear("lm_head", "vocab", bias=c.get("mlp_bias", False))),
            "sequence": Head(("ForSequenceClassification",), pooled),
            "token": TOKEN,
        },
        reads={**family.reads, "norm.weight": ("last_hidden_state", "lm_head.weight", first + ".weight")},
    )
