"""StarCoder 1 (`gpt_bigcode`): GPT-2 with one fused projection, in most models with one key and value for all heads."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import HEADS, linear, value_shift
from symfuse.architectures.gpt2 import ATTENTION, LAYER, OUT, family
from symfuse.groups import Invertible, Permutation
from symfuse.spec import Axis, Shift


@architecture("gpt_bigcode")
def gpt_bigcode(c: Config) -> Family:
    c.refuse("add_cross_attention", "its layers attend to an encoder too")
    gpt2 = family(c, "gelu_pytorch_tanh")
    axes, fused, out = dict(gpt2.axes), "(h (qk + qk* + v))", "(h v*)"
    if c.get("multi_query", True):
        head = axes.pop("h")
        axes |= {"q": replace(head, group=Permutation())}
        axes |= {name: Axis(axes[name].size, Invertible(), ("l",)) for name in ("qk", "v")}
        fused, out = "(q qk + qk* + v)", "(q v*)"
    tensors = {
        **gpt2.tensors,
        **linear(ATTENTION, fused),
        **linear(OUT, "residual", out),
        **linear(LAYER + "mlp.c_fc", "ffn"),
        **linear(LAYER + "mlp.c_proj", "residual", "ffn*"),
    }
    heads = {name: head for name, head in HEADS.items() if name != "question"}
    shifts = (Shift(ATTENTION + ".bias", "qk*"), value_shift(ATTENTION, OUT))
    return replace(gpt2, axes=axes, tensors=tensors, heads=heads, shifts=shifts, buffers=(*gpt2.buffers, "bias"))
