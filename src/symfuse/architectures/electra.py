"""ELECTRA: BERT's encoder behind embeddings of their own width; a generator or a discriminator on top."""

from __future__ import annotations

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.feed_forward import neurons
from symfuse.groups import Permutation
from symfuse.spec import Axis


@architecture("electra")
def electra(c: Config) -> Family:
    width = c.get("embedding_size", 128)
    projected = width != c.hidden_size
    e = "embedding" if projected else "residual"
    lm = e if c.tied else "lm"
    project = {"embeddings_project.weight": "residual embedding*", "embeddings_project.bias": "residual"}
    summary = {
        "sequence_summary.summary.weight": "summary residual*",
        "sequence_summary.summary.bias": "summary",
    }
    return Family(
        axes=bert.encoder_axes(c)
        | {
            "embedding": Axis(width, Permutation()),  # it has a LayerNorm, and the generator another
            "lm": Axis(width, Permutation()),
            "discriminator": Axis(c.hidden_size, neurons(c.get("hidden_act", "gelu"))),
            "head": Axis(c.hidden_size, neurons("gelu")),
            "summary": Axis(c.hidden_size, neurons(c.get("summary_activation", "linear"))),
        },
        prefix="electra.",
        tensors={name: text.replace("residual", e) for name, text in bert.EMBEDDINGS.items()}
        | (project if projected else {})
        | bert.ENCODER,
        heads={
            "generator": Head(
                ("ForMaskedLM", "ForCausalLM"),
                {
                    "generator_predictions.dense.weight": f"{lm} residual*",
                    "generator_predictions.dense.bias": lm,
                    "generator_predictions.LayerNorm.weight": f"|{lm}|",
                    "generator_predictions.LayerNorm.bias": lm,
                    "generator_lm_head.weight": f"vocab {lm}*",
                    "generator_lm_head.bias": "vocab",
                },
            ),
            "discriminator": Head(
                ("ForPreTraining",),
                {
                    "discriminator_predictions.dense.weight": "discriminator residual*",
                    "discriminator_predictions.dense.bias": "discriminator",
                    "discriminator_predictions.dense_prediction.weight": "1 discriminator*",
                    "discriminator_predictions.dense_prediction.bias": "1",
                },
            ),
            "sequence": Head(
                ("ForSequenceClassification",),
                {
                    "classifier.dense.weight": "head residual*",
                    "classifier.dense.bias": "head",
                    "classifier.out_proj.weight": "labels head*",
                    "classifier.out_proj.bias": "labels",
                },
            ),
            "choice": Head(
                ("ForMultipleChoice",), summary | {"classifier.weight": "1 summary*", "classifier.bias": "1"}
            ),
            "token": bert.TOKEN,
            "question": bert.QUESTION,
        },
        tied={"generator_lm_head.weight": "embeddings.word_embeddings.weight"} if c.tied else {},
        buffers=bert.BUFFERS,
        legacy=bert.LEGACY,
        shifts=bert.SHIFTS,
        outputs={"last_hidden_state": "residual"},
        gauges={
            **bert.gauges(
                c.num_hidden_layers,
                "generator_predictions.dense",
                "discriminator_predictions.dense",
                "sequence_summary.summary",
                "classifier.dense",
                transform=("generator_predictions.LayerNorm", "generator_lm_head"),
            ),
            # In between, the first layer does not read the norm.
            **({"embeddings_project.weight": "embeddings.LayerNorm.weight"} if projected else {}),
        },
    )
