"""ALBERT: BERT's encoder whose layers are shared, behind embeddings of their own width. RemBERT: BERT's encoder behind
such embeddings, and a masked language model's head of another width. ELECTRA: BERT's encoder behind such embeddings,
and a generator or a discriminator on top."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import dense_head, feed_forward, linear, neurons, norm, projections
from symfuse.architectures.names import LEGACY
from symfuse.groups import Permutation
from symfuse.spec import Axis

LAYER = "encoder.albert_layer_groups.{l}.albert_layers.{inner}."
NAMES = projections(LAYER + "attention.", "query", "key", "value", "dense")
AFTER, LAST = LAYER + "attention.LayerNorm", LAYER + "full_layer_layer_norm"
IN = "encoder.embedding_hidden_mapping_in"


def embeddings(width: int) -> tuple[dict[str, str], dict[str, Axis]]:
    """Embeddings of that width, a map to the stream behind them, and their axes."""
    written = {name: text.replace("residual", "embedding") for name, text in bert.EMBEDDINGS.items()}
    return written | linear(IN, "residual", "embedding*"), {"embedding": Axis(width, Permutation())}


def _gauges(c: Config, inner: int) -> dict[str, str]:
    """The first of a group reads what another group, or the map of the embeddings, puts out: no norm alone."""
    last = LAST.format(l=c.num_hidden_groups - 1, inner=inner - 1)
    out = dict.fromkeys(("pooler", "classifier", "qa_outputs", "predictions.dense"), last)
    out |= {IN: "embeddings.LayerNorm", "predictions.decoder": "predictions.LayerNorm"}
    for group in range(c.num_hidden_groups):
        for i in range(inner):
            out[f"{LAYER}ffn".format(l=group, inner=i)] = AFTER.format(l=group, inner=i)
            if i > 0:
                names = (NAMES[letter].format(l=group, inner=i) for letter in "qkv")
                out |= dict.fromkeys(names, LAST.format(l=group, inner=i - 1))
    return {f"{reader}.weight": f"{gain}.weight" for reader, gain in out.items()}


@architecture("albert")
def albert(c: Config) -> Family:
    axes, inner = bert.encoder_axes(c), c.size("inner_group_num", 1)
    shared = {name: replace(axis, per=("l", "inner", *axis.per[1:])) for name, axis in axes.items() if axis.per}
    written, widths = embeddings(c.size("embedding_size", 128))
    lm = Axis(c.size("embedding_size", 128), Permutation())
    pooled = linear("classifier", "labels", "pool*")
    order = linear("sop_classifier.classifier", "labels", "pool*")
    masked = {"predictions.bias": "vocab"}
    masked |= dense_head(c, "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "embedding")
    return Family(
        axes=axes | shared | widths | {"l": Axis(c.size("num_hidden_groups", 1)), "inner": Axis(inner), "lm": lm},
        prefix="albert.",
        tensors={
            **written,
            **NAMES.tensors(),
            **norm(AFTER),
            **feed_forward(LAYER + "ffn", LAYER + "ffn_output"),
            **norm(LAST),
        },
        optional={"pooler": linear("pooler", "pool")},
        heads={
            "masked LM": Head(("ForMaskedLM", "ForPreTraining"), masked),
            "sentence order": Head(("ForPreTraining",), order),
            "sequence": Head(("ForSequenceClassification",), pooled),
            "choice": bert.CHOICE,
            "token": bert.TOKEN,
            "question": bert.QUESTION,
        },
        tied=bert.ties(c, "predictions.decoder", "predictions.bias"),
        buffers=bert.BUFFERS,
        legacy=LEGACY,
        shifts=NAMES.shifts(),
        outputs=bert.OUTPUTS,
        gauges=_gauges(c, inner),
    )


DENSE, NORM, DECODER = (f"{bert.PREDICTIONS}{name}" for name in ("dense", "LayerNorm", "decoder"))


@architecture("rembert", tied=False)
def rembert(c: Config) -> Family:
    """Its classes tie nothing, whatever the config says."""
    family = bert.bert(c)
    written, widths = embeddings(c.size("input_embedding_size", 256))
    masked = linear(DENSE, "lm") | norm(NORM, "lm") | linear(DECODER, "vocab", "lm*")
    heads = {label: family.heads[label] for label in ("sequence", "choice", "token", "question")}
    heads["masked LM"] = Head(("ForMaskedLM", "ForCausalLM"), masked)
    return replace(
        family,
        axes={**family.axes, **widths, "lm": Axis(c.size("output_embedding_size", 1664), Permutation())},
        prefix="rembert.",
        tensors={**family.tensors, **written},
        heads=heads,
        tied={},
        gauges=bert.gauges(c.num_hidden_layers, DENSE, transform=(NORM, DECODER))
        | {f"{IN}.weight": "embeddings.LayerNorm.weight"},
    )


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
