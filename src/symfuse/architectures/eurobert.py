"""EuroBERT: Llama's blocks without a causal mask, and the heads of an encoder."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.bert import TOKEN
from symfuse.architectures.blocks import linear, neurons
from symfuse.architectures.llama import llama
from symfuse.spec import Axis


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
        reads={
            **family.reads,
            "norm.weight": ("last_hidden_state", "lm_head.weight", first + ".weight"),
        },
    )
