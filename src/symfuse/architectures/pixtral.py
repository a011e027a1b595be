"""Pixtral's image encoder: a Llama of patches, with positions in two directions."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import attention, linear, neurons, norm, projections, rotary_axes, size_of_head
from symfuse.groups import Invertible, Permutation, Signed, SignedMonomial
from symfuse.spec import Axis

LAYER = "transformer.layers.{l}."
FFN = LAYER + "feed_forward."
NAMES = projections(LAYER + "attention.", "q_proj", "k_proj", "v_proj", "o_proj")
TENSORS = {
    "patch_conv.weight": "residual channels patch patch",
    "ln_pre.weight": "|residual|",
    **attention(NAMES, bias=""),
    NAMES["q"] + ".weight": "(h c f) residual*",
    NAMES["k"] + ".weight": "(h c* f) residual*",
    **linear(FFN + "gate_proj", "|ffn|", bias=False),
    **linear(FFN + "up_proj", "ffn", bias=False),
    **linear(FFN + "down_proj", "residual", "ffn*", bias=False),
    **norm(LAYER + "attention_norm", bias=False),
    **norm(LAYER + "ffn_norm", bias=False),
}


@architecture("pixtral")
def pixtral(c: Config) -> Family:
    """The stream begins with a norm whose gain nothing linear reads, so that none is folded."""
    heads, hidden = c.num_attention_heads, c.hidden_size
    neurons(c.get("hidden_act", "silu"))  # whether it acts on each by itself
    head, inside = c.size("head_dim", size_of_head(hidden, heads)), ("l", "h")
    axes = {
        "l": Axis(c.num_hidden_layers), "residual": Axis(hidden, Signed()), "h": Axis(heads, Permutation(), ("l",)),
        "v": Axis(head, Invertible(), inside), "ffn": Axis(c.intermediate_size, SignedMonomial(), ("l",)),
        "channels": Axis(c.size("num_channels", 3)), "patch": Axis(c.size("patch_size", 16)),
    }  # fmt: skip
    return Family(
        axes=axes | rotary_axes(head, head, inside),
        tensors=TENSORS,
        outputs={"last_hidden_state": "residual"},
        norm="rms",
    )
