"""The task heads of GPT-2, GPT-NeoX, GPT-J, Falcon, OPT, BLOOM and MPT."""

from __future__ import annotations

from symfuse.architectures.base import Head
from symfuse.architectures.blocks import linear

HEADS = {
    "causal LM": Head(("ForCausalLM",), {"lm_head.weight": "vocab residual*"}),
    "sequence": Head(("ForSequenceClassification",), {"score.weight": "labels residual*"}),
    "token": Head(("ForTokenClassification",), linear("classifier", "labels")),
    "question": Head(("ForQuestionAnswering",), linear("qa_outputs", "2")),
}
# What reads the last norm.
READERS = ("last_hidden_state", *(name for head in HEADS.values() for name in head.tensors if name.endswith("weight")))
OUTPUTS = {"last_hidden_state": "residual"}
