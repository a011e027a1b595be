"""Pixtral's image encoder: a Llama of patches without shared keys, with positions in two directions."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import placed, renamed, rotary_axes, size_of_head
from symfuse.groups import Invertible, Permutation, Signed
from symfuse.spec import Axis

NAMES = {
    "layers.": "transformer.layers.", "self_attn.": "attention.", "mlp.": "feed_forward.",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
ENDS = {"patch_conv.weight": "residual channels patch patch", "ln_pre.weight": "|residual|"}
NORMS = {decoder.BEFORE_ATTENTION: "|residual|", decoder.BEFORE_MLP: "|residual|"}
TENSORS = placed(renamed(decoder.PROJECTIONS | decoder.GATED | NORMS, NAMES), {"kv q": "h", "kv": "h"})


@architecture("pixtral")
def pixtral(c: Config) -> Family:
    """The stream begins with a norm whose gain nothing linear reads, so that none is folded."""
    heads, inside = c.num_attention_heads, ("l", "h")
    head = c.size("head_dim", size_of_head(c.hidden_size, heads))
    axes = {
        "l": Axis(c.num_hidden_layers), "residual": Axis(c.hidden_size, Signed()),
        "h": Axis(heads, Permutation(), ("l",)), "v": Axis(head, Invertible(), inside),
        "channels": Axis(c.size("num_channels", 3)), "patch": Axis(c.size("patch_size", 16)),
    }  # fmt: skip
    axes |= decoder.gated(c) | rotary_axes(head, head, inside)
    return Family(axes=axes, tensors=ENDS | TENSORS, outputs={"last_hidden_state": "residual"}, norm="rms")
