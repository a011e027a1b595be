"""What GPT-NeoX, GPT-J, Falcon, OPT, BLOOM and MPT have in common: maps, LayerNorms, task heads."""

from __future__ import annotations

from symfuse.architectures.base import Head

HEADS = {
    "causal LM": Head(("ForCausalLM",), {"lm_head.weight": "vocab residual*"}),
    "sequence": Head(("ForSequenceClassification",), {"score.weight": "labels residual*"}),
    "token": Head(("ForTokenClassification",), {"classifier.weight": "labels residual*", "classifier.bias": "labels"}),
    "question": Head(("ForQuestionAnswering",), {"qa_outputs.weight": "2 residual*", "qa_outputs.bias": "2"}),
}
# What reads the last norm.
READERS = ("last_hidden_state", *(name for head in HEADS.values() for name in head.tensors if name.endswith("weight")))
OUTPUTS = {"last_hidden_state": "residual"}


def linear(name: str, out: str, read: str, *, bias: bool = True) -> dict[str, str]:
    """A linear map, stored [out, in]: where it writes, with its bias, and what it reads."""
    return {name + ".weight": f"{out} {read}"} | ({name + ".bias": out} if bias else {})


def norm(name: str, *, bias: bool = True) -> dict[str, str]:
    """A LayerNorm of the stream."""
    return {name + ".weight": "|residual|"} | ({name + ".bias": "residual"} if bias else {})
