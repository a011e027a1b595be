"""ViT, DeiT, MSN and I-JEPA: pre-norm encoders of image patches. AST: the same of spectrograms. MAE: the same,
and a decoder that is another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, feed_forward, linear, neurons, norm, norms, projections, with_names
from symfuse.architectures.parts import part_of
from symfuse.spec import Axis

LAYER = "encoder.layer.{l}."
ATTENTION = LAYER + "attention.attention."
NAMES = projections(LAYER + "attention.", "attention.query", "attention.key", "attention.value", "output.dense")
OUTPUT = NAMES["o"]

BIASES = {name: layout for name, layout in NAMES.tensors(bias="qkv").items() if name.endswith("bias")}
TENSORS = {
    "embeddings.cls_token": "1 1 residual",
    "embeddings.position_embeddings": "1 positions residual",
    **linear("embeddings.patch_embeddings.projection", "residual", "channels height width"),
    **NAMES.tensors(bias="o"),
    **feed_forward(LAYER + "intermediate.dense", LAYER + "output.dense"),
    **norms(LAYER + "layernorm_before", LAYER + "layernorm_after", "layernorm"),
}
READS = {
    LAYER + "layernorm_before.weight": NAMES.readers,
    LAYER + "layernorm_after.weight": (LAYER + "intermediate.dense.weight",),
    "layernorm.weight": (
        "last_hidden_state", "pooler.dense.weight", "classifier.weight", "decoder.0.weight", "cls_classifier.weight",
        "distillation_classifier.weight", "decoder.decoder_embed.weight",
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


def _family(c: Config, prefix: str, tokens: Mapping[str, str], images: Mapping[str, Axis]) -> Family:
    """tokens: those that stand before the patches besides the class token. images: the axes of patches."""
    act = c.get("hidden_act", "gelu")
    biased = c.get("qkv_bias", True)
    masked = c.class_name.endswith("ForMaskedImageModeling")  # its class needs the mask token
    return Family(
        axes=block_axes(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act)
        | dict(images)
        | {
            "pool": Axis(c.get("pooler_output_size", c.hidden_size), neurons(c.get("pooler_act", "tanh"))),
            "pixels": Axis(c.get("encoder_stride", 16) ** 2 * images["channels"].size),
            "labels": Axis(c.labels),
        },
        prefix=prefix,
        tensors=TENSORS | dict(tokens) | (BIASES if biased else {}) | (MASK if masked else {}),
        optional={"pooler": linear("pooler.dense", "pool"), "mask token": MASK},
        heads={
            "classification": _classifier(("ForImageClassification",), "classifier"),
            "masked image": Head(("ForMaskedImageModeling",), linear("decoder.0", "pixels", "residual* 1 1")),
        },
        shifts=NAMES.shifts() if biased else (),
        outputs={"last_hidden_state": "residual", "pooler_output": "pool"},
        reads=READS,
    )


@architecture("vit")
def vit(c: Config) -> Family:
    return _family(c, "vit.", {}, image_axes(c, 1))


@architecture("vit_msn")
def vit_msn(c: Config) -> Family:
    """Its class with a head is saved without the prefix of the encoder."""
    headed = c.class_name.endswith("ForImageClassification")
    return replace(vit(c), legacy={"encoder.": "vit.encoder."} if headed else {})


@architecture("deit")
def deit(c: Config) -> Family:
    teacher = _classifier(("WithTeacher",), "cls_classifier", "distillation_classifier")
    return _family(c, "deit.", DISTILLATION, image_axes(c, 2)).plus(heads={"with teacher": teacher})


@architecture("ijepa")
def ijepa(c: Config) -> Family:
    """There is no class token: what is classified is the mean of all patches."""
    family = _family(c, "ijepa.", {}, image_axes(c, 0))
    return replace(family, tensors={n: text for n, text in family.tensors.items() if n != "embeddings.cls_token"})


@architecture("audio-spectrogram-transformer")
def audio_spectrogram_transformer(c: Config) -> Family:
    """Patches overlap. The classifier reads the mean of two tokens behind one more norm, so that the gain of the first
    stays in the stream: only permutations act on it."""
    patch = c.pair("patch_size", 16)
    high, wide = c.size("num_mel_bins", 128) - patch[0], c.size("max_length", 1024) - patch[1]
    places = (high // c.size("frequency_stride", 10) + 1) * (wide // c.size("time_stride", 10) + 1)
    axes = {"positions": places + 2, "channels": 1, "height": patch[0], "width": patch[1]}
    family = _family(
        c, "audio_spectrogram_transformer.", DISTILLATION, {name: Axis(size) for name, size in axes.items()}
    )
    head = norm("classifier.layernorm") | linear("classifier.dense", "labels")
    return replace(
        family,
        optional={},
        heads={"classification": Head(("ForAudioClassification",), head)},
        outputs={"last_hidden_state": "residual", "pooler_output": "residual"},
        reads={},
    )


DECODER_SIZES = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 16, "intermediate_size": 2048}


@architecture("vit_mae")
def vit_mae(c: Config) -> Family:
    """The sines of both tables of positions are stored, and read from the file."""
    family = _family(c, "vit.", {}, image_axes(c, 1))
    biases = BIASES if c.get("qkv_bias", True) else {}
    layers, hidden, heads, ffn = (c.size(f"decoder_{key}", usual) for key, usual in DECODER_SIZES.items())
    blocks = Family(
        axes=block_axes(layers, hidden, heads, ffn, c.get("hidden_act", "gelu")),
        tensors={name: text for name, text in (TENSORS | biases).items() if name.startswith(LAYER)},
        shifts=family.shifts,
        reads={name: weights for name, weights in READS.items() if name.startswith(LAYER)},
    )
    decoder = part_of(with_names(blocks, {"encoder.layer.": "decoder_layers."}), "decoder.", "decoder")
    ends = {
        **linear("decoder.decoder_embed", "decoder_residual"),
        "decoder.mask_token": "1 1 decoder_residual",
        "decoder.decoder_pos_embed": "1 positions decoder_residual",
        **norm("decoder.decoder_norm", "decoder_residual"),
        **linear("decoder.decoder_pred", "pixels", "decoder_residual*"),
    }
    pixels = Axis(c.pair("patch_size", 16)[0] ** 2 * c.size("num_channels", 3))
    return replace(
        family.plus(
            axes={**decoder.axes, "pixels": pixels},
            reads={**decoder.reads, "decoder.decoder_norm.weight": ("decoder.decoder_pred.weight",)},
        ),
        legacy={"decoder.decoder_encoder.layer.": "decoder.decoder_layers."},  # as transformers 5 writes it
        optional={},
        heads={"pre-training": Head(("ForPreTraining",), {**decoder.tensors, **ends})},
        shifts=family.shifts + decoder.shifts,
        outputs={"last_hidden_state": "residual"},
    )
