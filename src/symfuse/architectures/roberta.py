"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT's encoder with other heads."""

from __future__ import annotations

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture


@architecture("roberta", "xlm-roberta", "camembert")
def roberta(c: Config) -> Family:
    lm = "residual" if c.tied else "lm"
    return Family(
        axes=bert.encoder_axes(c),
        prefix="roberta.",
        tensors=bert.EMBEDDINGS | bert.ENCODER,
        optional={"pooler": bert.POOLER},
        heads={
            "masked LM": Head(
                ("ForMaskedLM", "ForCausalLM"),
                {
                    "lm_head.bias": "vocab",
                    "lm_head.dense.weight": f"{lm} residual*",
                    "lm_head.dense.bias": lm,
                    "lm_head.layer_norm.weight": f"|{lm}|",
                    "lm_head.layer_norm.bias": lm,
                    "lm_head.decoder.weight": f"vocab {lm}*",
                    "lm_head.decoder.bias": "vocab",
                },
            ),
            "sequence": Head(
                ("ForSequenceClassification",),
                {
                    # A pooler of its own: tanh again.
                    "classifier.dense.weight": "pool residual*",
                    "classifier.dense.bias": "pool",
                    "classifier.out_proj.weight": "labels pool*",
                    "classifier.out_proj.bias": "labels",
                },
            ),
            "choice": bert.CHOICE,
            "token": bert.TOKEN,
            "question": bert.QUESTION,
        },
        tied={
            "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        }
        if c.tied
        else {},
        buffers=bert.BUFFERS,
        legacy=bert.LEGACY,
        shifts=bert.SHIFTS,
        outputs=bert.OUTPUTS,
        gauges=bert.gauges(
            c.num_hidden_layers,
            "lm_head.dense",
            "classifier.dense",
            transform=("lm_head.layer_norm", "lm_head.decoder"),
        ),
    )
