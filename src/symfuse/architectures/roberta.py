"""RoBERTa, XLM-RoBERTa, CamemBERT and data2vec: BERT's encoder with other heads. XLM-RoBERTa-XL and
RoBERTa-PreLayerNorm: the same with norms before the blocks. MPNet: the same with a table of scores by distance.
Longformer: the same with windows of attention, and maps of their own for tokens that attend to all others."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.bert import NAMES, SELF
from symfuse.architectures.blocks import Projections, dense_head, key_shift, linear, with_names
from symfuse.architectures.names import LEGACY
from symfuse.spec import Axis

MPNET = {
    "attention.self.query": "attention.attn.q", "attention.self.key": "attention.attn.k",
    "attention.self.value": "attention.attn.v", "attention.output.dense": "attention.attn.o",
    "attention.output.LayerNorm": "attention.LayerNorm",
}  # fmt: skip


@architecture("roberta", "xlm-roberta", "camembert")
def roberta(c: Config) -> Family:
    return Family(
        axes=bert.encoder_axes(c),
        prefix="roberta.",
        tensors=bert.EMBEDDINGS | bert.ENCODER,
        optional={"pooler": bert.POOLER},
        heads={
            "masked LM": Head(
                ("ForMaskedLM", "ForCausalLM"),
                {"lm_head.bias": "vocab", **dense_head(c, "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")},
            ),
            "sequence": Head(  # a pooler of its own: tanh again
                ("ForSequenceClassification",),
                linear("classifier.dense", "pool") | linear("classifier.out_proj", "labels", "pool*"),
            ),
            "choice": bert.CHOICE,
            "token": bert.TOKEN,
            "question": bert.QUESTION,
        },
        tied=bert.ties(c, "lm_head.decoder", "lm_head.bias"),
        buffers=bert.BUFFERS,
        legacy=LEGACY,
        shifts=bert.SHIFTS,
        outputs=bert.OUTPUTS,
        gauges=bert.gauges(
            c.num_hidden_layers,
            "lm_head.dense",
            "classifier.dense",
            transform=("lm_head.layer_norm", "lm_head.decoder"),
        ),
    )


@architecture("data2vec-text")
def data2vec_text(c: Config) -> Family:
    return replace(roberta(c), prefix="data2vec_text.")


@architecture("xlm-roberta-xl")
def xlm_roberta_xl(c: Config) -> Family:
    return bert.pre_norm(roberta(c), "attention.self_attn_layer_norm", "LayerNorm", "encoder.LayerNorm")


@architecture("roberta-prelayernorm")
def roberta_prelayernorm(c: Config) -> Family:
    family = replace(roberta(c), prefix="roberta_prelayernorm.")
    return bert.pre_norm(family, "attention.LayerNorm", "intermediate.LayerNorm", "LayerNorm", embeddings=True)


@architecture("mpnet")
def mpnet(c: Config) -> Family:
    """One table for all layers: one order of heads. There are no types of tokens."""
    family = with_names(roberta(c), MPNET, "mpnet.")
    tensors = {name: text for name, text in family.tensors.items() if "token_type" not in name}
    buckets = Axis(c.size("relative_attention_num_buckets", 32))
    return replace(family, tensors=tensors).plus(
        axes={"buckets": buckets, "h": replace(family.axes["h"], per=())},
        tensors={"encoder.relative_attention_bias.weight": "buckets h"},
    )


# Values of both kinds are read by one output, so that they move alike.
GLOBAL = Projections({letter: f"{name}_global" for letter, name in NAMES.items()})


@architecture("longformer")
def longformer(c: Config) -> Family:
    """A value's bias is not free: that of the other kind, which the output reads too, would have to follow."""
    family = roberta(c)
    maps = {n: text.replace("qk", "global_qk") for n, text in GLOBAL.tensors().items() if SELF in n}
    others = {
        r.replace(".weight", "_global.weight"): gain for r, gain in family.gauges.items() if "attention.self" in r
    }
    return replace(
        family, prefix="longformer.", shifts=(key_shift(NAMES["k"]), key_shift(GLOBAL["k"], "global_qk"))
    ).plus(axes={"global_qk": family.axes["qk"]}, tensors=maps, gauges=others)
