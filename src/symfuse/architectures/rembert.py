"""RemBERT: BERT's encoder behind embeddings of their own width, and a masked language model's head of another."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import bert
from symfuse.architectures.albert import IN, embeddings
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import linear, norm
from symfuse.groups import Permutation
from symfuse.spec import Axis

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
