"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT's encoder with other heads."""

from __future__ import annotations

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import dense_head, linear
from symfuse.architectures.names import LEGACY


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
                {
                    "lm_head.bias": "vocab",
                    **dense_head(c, "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
                },
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
