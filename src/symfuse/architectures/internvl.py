"""InternVL's image encoder: BEiT with one table of positions."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import (
    attention,
    attention_shifts,
    block_axes,
    feed_forward,
    linear,
    norm,
    projections,
    readers,
)
from symfuse.architectures.vit import MASK, image_axes
from symfuse.groups import Signed
from symfuse.spec import Axis, Shift

LAYER = "encoder.layer.{l}."
NAMES = projections(LAYER + "attention.", "q_proj", "k_proj", "v_proj", "projection_layer")
NORMS = ("layernorm_before", "layernorm_after")
LAST = "layernorm"
SCALES = {LAYER + "lambda_1": NAMES["o"] + ".weight", LAYER + "lambda_2": LAYER + "mlp.fc2.weight"}
READS = {
    LAYER + "layernorm_before.weight": readers(NAMES),
    LAYER + "layernorm_after.weight": (LAYER + "mlp.fc1.weight",),
}


@architecture("internvl_vision")
def internvl_vision(c: Config) -> Family:
    """Queries and keys may be normalised over all heads together: then their units are reordered and flipped only. Its
    stream is put out as it is, unless a last norm is behind it."""
    biased, normed = c.get("attention_bias", False), c.get("use_qk_norm", False)
    rms = c.get("norm_type", "layer_norm") == "rms_norm"
    last = not c.get("use_mean_pooling", True)
    axes = block_axes(
        c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, c.get("hidden_act", "gelu")
    )
    axes |= {"qk": Axis(axes["qk"].size, Signed(), axes["qk"].per)} if normed else {}
    tensors = {
        "embeddings.cls_token": "1 1 residual",
        **linear("embeddings.patch_embeddings.projection", "residual", "channels height width"),
        **attention(NAMES, bias="qkvo" if biased else "o"),
        **feed_forward(LAYER + "mlp.fc1", LAYER + "mlp.fc2"),
        **dict.fromkeys(SCALES, "|residual|"),
        **{name: text for one in NORMS for name, text in norm(LAYER + one, bias=not rms).items()},
    }
    tensors |= MASK if c.get("use_mask_token", False) else {}
    tensors |= norm(LAST) if last else {}
    if c.get("use_absolute_position_embeddings", True):
        tensors["embeddings.position_embeddings"] = "1 positions residual"
    if normed:
        tensors |= {f"{NAMES[at][:-4]}norm.weight": "(h |qk|)" for at in "qk"}
    shifts: tuple[Shift, ...] = attention_shifts(NAMES, bias="v" if normed else "qkv") if biased else ()
    return Family(
        axes=axes | image_axes(c, 1, image=448, patch=14),
        tensors=tensors,
        shifts=shifts,
        outputs={"last_hidden_state": "residual"},
        reads={} if rms and last else READS | {LAST + ".weight": ("last_hidden_state",)},
        norm="rms" if rms else "layer",
        scales=SCALES,
    )
