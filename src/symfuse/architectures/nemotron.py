"""Decoders without a gate in their feed-forward: Nemotron, Arcee, Jais 2, Apertus."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY, with_names
from symfuse.groups import Group, Permutation, Sign
from symfuse.spec import NormKind

READS = decoder.READS | {decoder.BEFORE_MLP: (decoder.MLP + "up_proj.weight",)}
LEARNED = {decoder.MLP + f"act_fn.alpha_{side}": "1" for side in "pn"}  # what xIELU learns, and its constants
LEARNED |= {decoder.MLP + f"act_fn.{name}": "()" for name in ("beta", "eps")}
APERTUS = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}


def _family(
    c: Config,
    norm: NormKind,
    activation: str = "relu2",
    *,
    biases: bool = False,
    plane: Group = ROTARY,
    share: float | None = None,
) -> Family:
    rms = norm == "rms"
    axes = decoder.axes(c, plane=plane, residual=decoder.SIGNED if rms else Permutation(), share=share)
    norms = decoder.NORMS | ({} if rms else decoder.norm_biases(decoder.NORMS))
    tensors = decoder.PROJECTIONS | decoder.PLAIN | norms
    family = decoder.family(c, axes | decoder.ungated(c, c.get("hidden_act", activation)), tensors, READS, norm)
    family = decoder.biased(family, c.get("attention_bias", biases))
    return family.plus(tensors=decoder.PLAIN_BIASES) if c.get("mlp_bias", biases) else family


@architecture("arcee", tied=False)
def arcee(c: Config) -> Family:
    return _family(c, "rms")


@architecture("jais2", tied=False)
def jais2(c: Config) -> Family:
    return _family(c, "layer", biases=True)


@architecture("nemotron", tied=False)
def nemotron(c: Config) -> Family:
    """The gains of its LayerNorms are stored less 1."""
    return decoder.partly(_family(c, "layer+1", share=0.5))


@architecture("apertus", tied=False)
def apertus(c: Config) -> Family:
    family = _family(c, "rms", "xielu", plane=Sign()).plus(tensors=decoder.NORMS_OF_HEADS)
    learned = LEARNED if c.get("hidden_act", "xielu") == "xielu" else {}
    return with_names(family.plus(tensors=learned), APERTUS)
