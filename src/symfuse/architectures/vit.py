"""ViT and DeiT: pre-norm encoders of image patches."""

from __future__ import annotations

from collections.abc import Mapping

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, key_shift, value_shift
from symfuse.architectures.feed_forward import neurons
from symfuse.spec import Axis

LAYER = "encoder.layer.{l}."
ATTENTION = LAYER + "attention.attention."
OUTPUT = LAYER + "attention.output.dense"

BIASES = {
    ATTENTION + "query.bias": "(h qk)",
    ATTENTION + "key.bias": "(h qk*)",
    ATTENTION + "value.bias": "(h v)",
}
TENSORS = {
    "embeddings.cls_token": "1 1 residual",
    "embeddings.position_embeddings": "1 positions residual",
    "embeddings.patch_embeddings.projection.weight": "residual channels height width",
    "embeddings.patch_embeddings.projection.bias": "residual",
    ATTENTION + "query.weight": "(h qk) residual*",
    ATTENTION + "key.weight": "(h qk*) residual*",
    ATTENTION + "value.weight": "(h v) residual*",
    OUTPUT + ".weight": "residual (h v*)",
    OUTPUT + ".bias": "residual",
    LAYER + "intermediate.dense.weight": "ffn residual*",
    LAYER + "intermediate.dense.bias": "ffn",
    LAYER + "output.dense.weight": "residual ffn*",
    LAYER + "output.dense.bias": "residual",
    LAYER + "layernorm_before.weight": "|residual|",
    LAYER + "layernorm_before.bias": "residual",
    LAYER + "layernorm_after.weight": "|residual|",
    LAYER + "layernorm_after.bias": "residual",
    "layernorm.weight": "|residual|",
    "layernorm.bias": "residual",
}
READS = {
    LAYER + "layernorm_before.weight": tuple(f"{ATTENTION}{name}.weight" for name in ("query", "key", "value")),
    LAYER + "layernorm_after.weight": (LAYER + "intermediate.dense.weight",),
    "layernorm.weight": (
        "last_hidden_state", "pooler.dense.weight", "classifier.weight", "decoder.0.weight", "cls_classifier.weight",
        "distillation_classifier.weight",
    ),
}  # fmt: skip
DISTILLATION = {"embeddings.distillation_token": "1 1 residual"}
MASK = {"embeddings.mask_token": "1 1 residual"}


def _classifier(classes: tuple[str, ...], *names: str) -> Head:
    return Head(
        classes,
        {f"{n}.weight": "labels residual*" for n in names} | {f"{n}.bias": "labels" for n in names},
    )


def image_axes(c: Config, tokens: int, image: int = 224, patch: int = 16) -> dict[str, Axis]:
    """The axes of an image and its patches. tokens: those that are no patches and have a position each. image, patch:
    what `transformers` takes where the config does not say."""
    sides, part = c.pair("image_size", image), c.pair("patch_size", patch)
    return {
        "positions": Axis((sides[0] // part[0]) * (sides[1] // part[1]) + tokens),
        "channels": Axis(c.size("num_channels", 3)),
        "height": Axis(part[0]),
        "width": Axis(part[1]),
    }


def _family(c: Config, prefix: str, tokens: Mapping[str, str], heads: Mapping[str, Head]) -> Family:
    """tokens: those that stand before the patches besides the class token, one position each."""
    act = c.get("hidden_act", "gelu")
    biased = c.get("qkv_bias", True)
    masked = c.class_name.endswith("ForMaskedImageModeling")  # its class needs the mask token
    return Family(
        axes=block_axes(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act)
        | image_axes(c, 1 + len(tokens))
        | {
            "pool": Axis(c.get("pooler_output_size", c.hidden_size), neurons(c.get("pooler_act", "tanh"))),
            "pixels": Axis(c.get("encoder_stride", 16) ** 2 * c.num_channels),
            "labels": Axis(c.labels),
        },
        prefix=prefix,
        tensors=TENSORS | dict(tokens) | (BIASES if biased else {}) | (MASK if masked else {}),
        optional={
            "pooler": {"pooler.dense.weight": "pool residual*", "pooler.dense.bias": "pool"},
            "mask token": MASK,
        },
        heads={
            "classification": _classifier(("ForImageClassification",), "classifier"),
            "masked image": Head(
                ("ForMaskedImageModeling",),
                {"decoder.0.weight": "pixels residual* 1 1", "decoder.0.bias": "pixels"},
            ),
            **heads,
        },
        shifts=(key_shift(ATTENTION + "key"), value_shift(ATTENTION + "value", OUTPUT)) if biased else (),
        outputs={"last_hidden_state": "residual", "pooler_output": "pool"},
        reads=READS,
    )


@architecture("vit")
def vit(c: Config) -> Family:
    return _family(c, "vit.", {}, {})


@architecture("deit")
def deit(c: Config) -> Family:
    teacher = _classifier(("WithTeacher",), "cls_classifier", "distillation_classifier")
    return _family(c, "deit.", DISTILLATION, {"with teacher": teacher})
