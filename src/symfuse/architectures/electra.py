"""ELECTRA: BERT's encoder behind embeddings of their own width; a generator or a discriminator on top."""

from __future__ import annotations

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import dense_head, linear, neurons
from symfuse.architectures.names import LEGACY
from symfuse.groups import Permutation
from symfuse.spec import Axis


@architecture("electra")
def electra(c: Config) -> Family:
    width = c.get("embedding_size", 128)
    projected = width != c.hidden_size
    e = "embedding" if projected else "residual"
    project = linear("embeddings_project", "residual", "embedding*")
    summary = linear("sequence_summary.summary", "summary")
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
                dense_head(c, "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", e),
            ),
            "discriminator": Head(
                ("ForPreTraining",),
                linear("discriminator_predictions.dense", "discriminator")
                | linear("discriminator_predictions.dense_prediction", "1", "discriminator*"),
            ),
            "sequence": Head(
                ("ForSequenceClassification",),
                linear("classifier.dense", "head") | linear("classifier.out_proj", "labels", "head*"),
            ),
            "choice": Head(("ForMultipleChoice",), summary | linear("classifier", "1", "summary*")),
            "token": bert.TOKEN,
            "question": bert.QUESTION,
        },
        tied={"generator_lm_head.weight": bert.WORDS} if c.tied else {},
        buffers=bert.BUFFERS,
        legacy=LEGACY,
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
