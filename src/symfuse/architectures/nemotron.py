"""Decoders without a gate in their feed-forward: Nemotron, Arcee, Jais 2, Apertus; StarCoder2, with LayerNorms and
biases everywhere; and nanochat, whose norms have no gains: the stream may be rotated as it is, and the planes of
queries and keys, which are normalised behind their positions, be turned and not rescaled."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY, renamed, with_names
from symfuse.groups import Group, Orthogonal, Permutation, Phase, Sign
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


STARCODER = {"up_proj": "c_fc", "down_proj": "c_proj"}


@architecture("starcoder2")
def starcoder2(c: Config) -> Family:
    axes = decoder.axes(c, residual=Permutation()) | decoder.ungated(c, c.get("hidden_act", "gelu_pytorch_tanh"))
    tensors = decoder.PROJECTIONS | decoder.PLAIN | decoder.NORMS | decoder.norm_biases(decoder.NORMS)
    family = decoder.family(c, axes, tensors, READS, "layer")
    if c.get("use_bias", True):
        family = decoder.biased(family, True).plus(tensors=decoder.PLAIN_BIASES)
    return with_names(family, STARCODER)


FEED_FORWARD = renamed(decoder.PLAIN, {"up_proj": "fc1", "down_proj": "fc2"})


@architecture("nanochat", tied=False)
def nanochat(c: Config) -> Family:
    axes = decoder.axes(c, plane=Phase(), residual=Orthogonal())
    axes |= decoder.ungated(c, c.get("hidden_act", "relu2"))
    family = decoder.family(c, axes, decoder.PROJECTIONS | FEED_FORWARD, reads={})
    return decoder.biased(family, c.get("attention_bias", False))
