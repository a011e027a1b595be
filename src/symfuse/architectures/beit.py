"""BEiT and data2vec: ViT with a table of scores by distance for each head, a LayerScale, and no key bias. InternVL's
image encoder: the same with one table of positions."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, feed_forward, linear, norm, norms, projections, value_shift
from symfuse.architectures.vit import ATTENTION, BIASES, LAYER, MASK, OUTPUT, READS, TENSORS, image_axes
from symfuse.errors import SpecError
from symfuse.groups import Signed
from symfuse.spec import Axis, Shift

TABLE = "relative_position_bias.relative_position_bias_table"
OF_LAYER, OF_ALL = ATTENTION + TABLE, "encoder." + TABLE
POSITIONS, LAST = "embeddings.position_embeddings", "layernorm"
KEY_BIAS = ATTENTION + "key.bias"
SCALES = {LAYER + "lambda_1": OUTPUT + ".weight", LAYER + "lambda_2": LAYER + "output.dense.weight"}


@architecture("beit", "data2vec-vision")
def beit(c: Config) -> Family:
    own, shared = c.get("use_relative_position_bias", False), c.get("use_shared_relative_position_bias", False)
    mean = c.get("use_mean_pooling", True)
    if not mean and c.class_name.endswith("ForMaskedImageModeling"):
        raise SpecError(
            "config.json: use_mean_pooling is false, so that a BeitForMaskedImageModeling has two norms called "
            "layernorm, and transformers takes one for the other"
        )
    scaled = c.get("layer_scale_init_value", 0.1) > 0
    hidden, heads = c.size("hidden_size", 768), c.size("num_attention_heads", 12)
    layers, ffn = c.size("num_hidden_layers", 12), c.size("intermediate_size", 3072)
    axes = block_axes(layers, hidden, heads, ffn, c.get("hidden_act", "gelu")) | image_axes(c, 1)
    axes |= {"distances": Axis(_distances(c)), "labels": Axis(c.labels), "codes": Axis(c.size("vocab_size", 8192))}
    if shared:  # one table for all layers: one order of heads
        axes["h"] = replace(axes["h"], per=())
    tensors = {name: layout for name, layout in TENSORS.items() if not name.startswith(LAST)} | BIASES
    del tensors[KEY_BIAS]
    if not c.get("use_absolute_position_embeddings", False):
        del tensors[POSITIONS]
    tensors |= {"embeddings.mask_token": "1 1 residual"} if c.get("use_mask_token", False) else {}
    tensors |= dict.fromkeys(SCALES, "|residual|") if scaled else {}
    tensors |= {OF_LAYER: "distances h"} if own else {}
    tensors |= {OF_ALL: "distances h"} if shared else {}
    tensors |= {} if mean else norm(LAST)
    pooled = ("pooler_output", "classifier.weight")
    return Family(
        axes=axes,
        prefix=c.prefix,
        tensors=tensors,
        # The norm of the mean of all patches: of classes that pool.
        optional={"pooler": norm("pooler.layernorm")} if mean else {},
        heads={
            "classification": Head(("ForImageClassification",), linear("classifier", "labels")),
            "masked image": Head(
                ("ForMaskedImageModeling",), (norm(LAST) if mean else {}) | linear("lm_head", "codes")
            ),
        },
        buffers=("*relative_position_index",),
        shifts=(value_shift(ATTENTION + "value", OUTPUT),),
        outputs={"last_hidden_state": "residual", "pooler_output": "residual"},
        reads=READS
        | {
            LAST + ".weight": ("lm_head.weight",) if mean else ("last_hidden_state", *pooled),
            "pooler.layernorm.weight": pooled,
        },
        scales=SCALES if scaled else {},
    )


def _distances(c: Config) -> int:
    """Of pairs of patches, and three for the class token: to it, from it, and its own."""
    (height, width), (h, w) = c.pair("image_size", 224), c.pair("patch_size", 16)
    return (2 * (height // h) - 1) * (2 * (width // w) - 1) + 3


PROJECTIONS = projections(LAYER + "attention.", "q_proj", "k_proj", "v_proj", "projection_layer")
INTERN_SCALES = {LAYER + "lambda_1": PROJECTIONS["o"] + ".weight", LAYER + "lambda_2": LAYER + "mlp.fc2.weight"}
INTERN_READS = {
    LAYER + "layernorm_before.weight": PROJECTIONS.readers,
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
        **PROJECTIONS.tensors(bias="qkvo" if biased else "o"),
        **feed_forward(LAYER + "mlp.fc1", LAYER + "mlp.fc2"),
        **dict.fromkeys(INTERN_SCALES, "|residual|"),
        **norms(LAYER + "layernorm_before", LAYER + "layernorm_after", bias=not rms),
    }
    tensors |= MASK if c.get("use_mask_token", False) else {}
    tensors |= norm(LAST) if last else {}
    if c.get("use_absolute_position_embeddings", True):
        tensors["embeddings.position_embeddings"] = "1 positions residual"
    if normed:
        tensors |= {f"{PROJECTIONS[at][:-4]}norm.weight": "(h |qk|)" for at in "qk"}
    shifts: tuple[Shift, ...] = PROJECTIONS.shifts(bias="v" if normed else "qkv") if biased else ()
    return Family(
        axes=axes | image_axes(c, 1, image=448, patch=14),
        tensors=tensors,
        shifts=shifts,
        outputs={"last_hidden_state": "residual"},
        reads={} if rms and last else INTERN_READS | {LAST + ".weight": ("last_hidden_state",)},
        norm="rms" if rms else "layer",
        scales=INTERN_SCALES,
    )
