"""BEiT and data2vec: ViT with a table of scores by distance for each head, a LayerScale, and no key bias."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, linear, norm, value_shift
from symfuse.architectures.vit import ATTENTION, BIASES, LAYER, OUTPUT, READS, TENSORS, image_axes
from symfuse.errors import SpecError
from symfuse.spec import Axis

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
                ("ForMaskedImageModeling",),
                (norm(LAST) if mean else {}) | linear("lm_head", "codes"),
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
