"""ViT and DeiT: pre-norm encoders of image patches."""

from __future__ import annotations

from collections.abc import Mapping

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import (
    attention,
    attention_shifts,
    block_axes,
    linear,
    neurons,
    norm,
    projections,
    readers,
)
from symfuse.spec import Axis

LAYER = "encoder.layer.{l}."
ATTENTION = LAYER + "attention.attention."
NAMES = projections(LAYER + "attention.", "attention.query", "attention.key", "attention.value", "output.dense")
OUTPUT = NAMES["o"]

BIASES = {name: layout for name, layout in attention(NAMES, bias="qkv").items() if name.endswith("bias")}
TENSORS = {
    "embeddings.cls_token": "1 1 residual",
    "embeddings.position_embeddings": "1 positions residual",
    **linear("embeddings.patch_embeddings.projection", "residual", "channels height width"),
    **attention(NAMES, bias="o"),
    **linear(LAYER + "intermediate.dense", "ffn"),
    **linear(LAYER + "output.dense", "residual", "ffn*"),
    **norm(LAYER + "layernorm_before"),
    **norm(LAYER + "layernorm_after"),
    **norm("layernorm"),
}
READS = {
    LAYER + "layernorm_before.weight": readers(NAMES),
    LAYER + "layernorm_after.weight": (LAYER + "intermediate.dense.weight",),
    "layernorm.weight": (
        "last_hidden_state", "pooler.dense.weight", "classifier.weight", "decoder.0.weight", "cls_classifier.weight",
        "distillation_classifier.weight",
    ),
}  # fmt: skip
DISTILLATION = {"embeddings.distillation_token": "1 1 residual"}
MASK = {"embeddings.mask_token": "1 1 residual"}


def _classifier(classes: tuple[str, ...], *names: str) -> Head:
    return Head(classes, {f"{n}.weight": "labels residual*" for n in names} | {f"{n}.bias": "labels" for n in names})


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
            "pooler": linear("pooler.dense", "pool"),
            "mask token": MASK,
        },
        heads={
            "classification": _classifier(("ForImageClassification",), "classifier"),
            "masked image": Head(("ForMaskedImageModeling",), linear("decoder.0", "pixels", "residual* 1 1")),
            **heads,
        },
        shifts=attention_shifts(NAMES) if biased else (),
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
