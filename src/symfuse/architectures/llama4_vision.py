"""Llama 4 with images: an encoder whose positions turn planes of neighbours, in two directions, and an adapter that
reads four patches side by side."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import (
    block_axes,
    linear,
    neurons,
    norm,
    placed,
    projections,
    rotary_axes,
)
from symfuse.architectures.multimodal import BETWEEN, joined, patches_of
from symfuse.spec import Axis

LAYER = "model.layers.{l}."
NAMES = projections(LAYER + "self_attn.", "q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("layernorm_pre", "layernorm_post", LAYER + "input_layernorm", LAYER + "post_attention_layernorm")
TENSORS = {
    "patch_embedding.linear.weight": "residual pixels",
    "class_embedding": "residual",
    "positional_embedding_vlm": "positions residual",
    **placed(NAMES.tensors(), {"h qk*": "h f c*", "h qk": "h f c"}),
    **linear(LAYER + "mlp.fc1", "ffn"),
    **linear(LAYER + "mlp.fc2", "residual", "ffn*"),
    **{name: layout for one in NORMS for name, layout in norm(one).items()},
    "vision_adapter.mlp.fc1.weight": "adapter_ffn (patches residual*)",
    "vision_adapter.mlp.fc2.weight": "projection adapter_ffn*",
}


@architecture("llama4_vision_model")
def llama4_vision_model(c: Config) -> Family:
    """What its adapter puts out has passed GELU."""
    hidden, heads, patch = c.hidden_size, c.num_attention_heads, c.size("patch_size", 14)
    axes = block_axes(c.num_hidden_layers, hidden, heads, c.intermediate_size, "gelu")
    head = axes.pop("qk").size
    axes |= rotary_axes(head, head, ("l", "h")) | patches_of(c.get("pixel_shuffle_ratio", 0.5), "pixel_shuffle_ratio")
    axes |= {
        "pixels": Axis(c.size("num_channels", 3) * patch**2),
        "positions": Axis((c.size("image_size", 448) // patch) ** 2 + 1),
        "adapter_ffn": Axis(c.size("projector_input_dim", 4096), neurons("gelu")),
        "projection": Axis(c.size("projector_output_dim", 4096), neurons("gelu")),
    }
    shifts = NAMES.shifts(bias="v")
    return Family(axes, TENSORS, shifts=shifts, outputs={"last_hidden_state": "projection"})


@joined(
    "llama4",
    text="llama4_text",
    vision="llama4_vision_model",
    at=("language_model.", "vision_model.", BETWEEN),
    tied=False,
)
def llama4(_c: Config, both: Family) -> Family:
    return both.plus(tensors={BETWEEN + "linear_1.weight": "residual vision_projection*"})
