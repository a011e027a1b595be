"""ESM: RoBERTa of amino acids with norms before the blocks; positions turn queries and keys, or are learned."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import bert, roberta
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import neurons, norm, placed, turned, value_shift
from symfuse.errors import SpecError

POSITIONS = "embeddings.position_embeddings.weight"
EMBEDDING_NORM = "embeddings.layer_norm"
# The speeds of the turns are stored: once, or by older versions and under their names in each layer.
SPEEDS, IN_LAYER = "rotary_embeddings.inv_freq", "attention.self.rotary_embeddings.inv_freq"
OLD_SPEEDS = {f"encoder.layer.{first}.{IN_LAYER}": SPEEDS for first in "0*"}

ESM2 = {
    "vocab_size": 33, "hidden_size": 480, "num_hidden_layers": 12, "num_attention_heads": 20,
    "intermediate_size": 1920, "max_position_embeddings": 1026, "position_embedding_type": "rotary",
}  # fmt: skip


@architecture("esm", example=ESM2)
def esm(c: Config) -> Family:
    """Its last map reads the attention of all heads of all layers (contacts), and so moves with them."""
    if c.get("is_folding_model", False):
        raise SpecError("config.json: is_folding_model is true; symfuse has a declaration for ESM as an encoder only")
    biased, before = c.get("position_embedding_type", "absolute") == "absolute", c.get("emb_layer_norm_before", False)
    family = replace(roberta.roberta(c), prefix="esm.")
    family = bert.pre_norm(family, "attention.LayerNorm", "LayerNorm", "encoder.emb_layer_norm_after")
    tensors = {name: text for name, text in family.tensors.items() if "token_type" not in name}
    tensors |= norm(EMBEDDING_NORM) if before else {}
    tensors |= {"contact_head.regression.weight": "1 (l h)", "contact_head.regression.bias": "1"}
    masked = {n: t for n, t in family.heads["masked LM"].tensors.items() if n != "lm_head.decoder.bias"}
    family = replace(
        family.plus(axes={"ffn": replace(family.axes["ffn"], group=neurons("gelu"))}),
        tensors=tensors,
        heads={**family.heads, "masked LM": Head(("ForMaskedLM",), masked)},
        buffers=(*family.buffers, f"*encoder.layer.[1-9]*.{IN_LAYER}"),
        reads={} if before else family.reads,
    )
    return family if biased else _turned(family)


def _turned(family: Family) -> Family:
    """Files may have learned positions, which nothing reads."""
    maps = placed(bert.NAMES.tensors(), {"qk*": "c* f", "qk": "c f"})
    tensors = {name: text for name, text in {**family.tensors, **maps}.items() if name != POSITIONS}
    return replace(
        family,
        axes=turned(family.axes),
        tensors=tensors | {SPEEDS: "f"},
        legacy={**family.legacy, **OLD_SPEEDS},
        optional={**family.optional, "learned positions": {POSITIONS: "positions residual"}},
        shifts=(value_shift(bert.NAMES["v"], bert.NAMES["o"]),),
    )
