"""StarCoder2: LayerNorm, neurons without a gate, biases everywhere."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import neurons
from symfuse.groups import Permutation
from symfuse.spec import Axis

NEURONS = {decoder.MLP + "c_fc.weight": "ffn residual*", decoder.MLP + "c_proj.weight": "residual ffn*"}
NEURON_BIASES = {decoder.MLP + "c_fc.bias": "ffn", decoder.MLP + "c_proj.bias": "residual"}


@architecture("starcoder2")
def starcoder2(c: Config) -> Family:
    group = neurons(c.get("hidden_act", "gelu_pytorch_tanh"))
    axes = decoder.axes(c, residual=Permutation()) | {"ffn": Axis(c.intermediate_size, group, per=("l",))}
    tensors = decoder.PROJECTIONS | NEURONS | decoder.NORMS | decoder.norm_biases(decoder.NORMS)
    family = decoder.family(
        c, axes, tensors, decoder.READS | {decoder.BEFORE_MLP: (decoder.MLP + "c_fc.weight",)}, "layer"
    )
    return decoder.biased(family, True).plus(tensors=NEURON_BIASES) if c.get("use_bias", True) else family
