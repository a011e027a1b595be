"""StarCoder2: LayerNorm, neurons without a gate, biases everywhere."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.decoder import (
    BEFORE_MLP,
    EMBEDDING,
    MLP,
    NORMS,
    PROJECTIONS,
    READS,
    biased_attention,
    decoder,
    decoder_axes,
    norm_biases,
    with_tensors,
)
from symfuse.architectures.feed_forward import neurons
from symfuse.groups import Permutation
from symfuse.spec import Axis

NEURONS = {MLP + "c_fc.weight": "ffn residual*", MLP + "c_proj.weight": "residual ffn*"}
NEURON_BIASES = {MLP + "c_fc.bias": "ffn", MLP + "c_proj.bias": "residual"}


@architecture("starcoder2")
def starcoder2(c: Config) -> Family:
    group = neurons(c.get("hidden_act", "gelu_pytorch_tanh"))
    axes = decoder_axes(c, residual=Permutation()) | {"ffn": Axis(c.intermediate_size, group, per=("l",))}
    tensors = EMBEDDING | PROJECTIONS | NEURONS | NORMS | norm_biases(NORMS)
    family = decoder(c, axes, tensors, READS | {BEFORE_MLP: (MLP + "c_fc.weight",)}, "layer")
    return with_tensors(biased_attention(family), NEURON_BIASES) if c.get("use_bias", True) else family
