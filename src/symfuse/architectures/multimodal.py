"""Models that read images and texts, composed from the declarations of their parts: only what lies between the image
encoder and the text model is declared here.

The text part has the axes of its own declaration, the image part the same names behind `vision_`. What lies between
reads the image encoder's stream and writes to that of the text, as the token embeddings do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from symfuse.architectures.base import Config, Family, architecture, lookup
from symfuse.architectures.blocks import linear, neurons, norm
from symfuse.architectures.parts import part_of, together
from symfuse.errors import SpecError
from symfuse.groups import Invertible
from symfuse.spec import Axis

BETWEEN = "multi_modal_projector."
HIDDEN = "projector_ffn"
Join = Callable[[Config, Family], Family]


def joined(
    *model_types: str,
    text: str,
    vision: str,
    at: Sequence[str] = ("language_model.", "vision_tower.", BETWEEN),
    **fields: Any,
) -> Callable[[Join], Join]:
    """Register a family whose parts are of the types that `text_config` and `vision_config` say, by default these. The
    decorated function gets the config, with its defaults, and both parts as one family, to which it adds what lies
    between.

    at: the beginnings of the names of the text part, of the image part, and of all others.
    """

    def register(join: Join) -> Join:
        def declare(c: Config) -> Family:
            said = c.get("tie_word_embeddings") is not None
            c = c.completed()
            words = _text(c, text, at, said)
            return join(c, together(words, _vision(c, vision, at, words)))

        architecture(*model_types, parts={"text_config": text, "vision_config": vision}, **fields)(declare)
        return join

    return register


def _declare(c: Config, key: str, usual: str) -> Family:
    part = c.part(key, usual)
    family = lookup({"model_type": part.family}, f"{key} of config.json").declare(part)
    if "residual" not in family.axes:
        raise SpecError(f"config.json: {key}.model_type is {part.family!r}, which has no stream that others read")
    return family


def _text(c: Config, usual: str, at: Sequence[str], said: bool) -> Family:
    """said: whether the config says if the head is tied; else it is where the file has none."""
    whole = part_of(_declare(c, "text_config", usual), at[0], last=True)
    causal = {label: head for label, head in whole.heads.items() if label == "causal LM"}
    heads = {label: replace(head, classes=("ForConditionalGeneration",)) for label, head in causal.items()}
    whole = whole if said else replace(whole, tied={}, absent=whole.tied)
    return replace(whole.plus(heads=heads), prefix="model.", legacy=_old_names(at))


def _vision(c: Config, usual: str, at: Sequence[str], text: Family) -> Family:
    """Its stream is one that norms can be folded into only if these are of the kind that the text has."""
    part = part_of(_declare(c, "vision_config", usual), at[1], "vision")
    return part if part.norm == text.norm and not part.scales else replace(part, reads={}, scales={})


def _old_names(at: Sequence[str]) -> dict[str, str]:
    """Beginnings of names by release → those of today."""
    text, vision, *_ = at
    old = {f"model.{vision}vision_model.": f"model.{vision}", f"{vision}vision_model.": f"model.{vision}"}
    old |= {f"{text}lm_head.": "lm_head.", f"{text}model.": f"model.{text}"}
    for part in at:
        old |= {f"model.{part}": f"model.{part}", part: f"model.{part}"}
    return old | {"model.": f"model.{text}"}


def hidden_layer(c: Config, both: Family, read: str, *, bias: bool = True) -> Family:
    """Two linear maps with neurons between them, as many as the text is wide."""
    axes = {HIDDEN: Axis(both.axes["residual"].size, neurons(c.get("projector_hidden_act", "gelu")))}
    maps = linear(BETWEEN + "linear_1", HIDDEN, read, bias=bias) | linear(
        BETWEEN + "linear_2", "residual", HIDDEN + "*", bias=bias
    )
    return both.plus(axes=axes, tensors=maps)


def _layers_read(c: Config) -> str:
    """The image encoder's stream, once for each layer from which it is taken: any of them, as all have one stream."""
    layers = c.get("vision_feature_layer", None)
    count = len(layers) if isinstance(layers, list) else 1
    return "(" + " + ".join(["vision_residual*"] * count) + ")" if count > 1 else "vision_residual*"


@joined("llava", text="llama", vision="clip_vision_model", tied=False)
def llava(c: Config, both: Family) -> Family:
    return hidden_layer(c, both, _layers_read(c), bias=c.get("multimodal_projector_bias", True))


NEWLINE = "image_newline"


@joined(
    "llava_next",
    text="llama",
    vision="clip_vision_model",
    tied=False,
    at=("language_model.", "vision_tower.", BETWEEN, NEWLINE),
)
def llava_next(c: Config, both: Family) -> Family:
    return llava(c, both).plus(tensors={NEWLINE: "residual"})


@joined("paligemma", text="gemma", vision="siglip_vision_model")
def paligemma(c: Config, both: Family) -> Family:
    c.get("projection_dim")  # which the class takes for the size of the stream: it is one of the sizes
    return both.plus(tensors=linear(BETWEEN + "linear", "residual", "vision_residual*"))


@joined("gemma3", text="gemma3_text", vision="siglip_vision_model")
def gemma3(_c: Config, both: Family) -> Family:
    """The mean of neighbouring patches is normalised, with a gain, and mapped to the text."""
    tensors = norm(BETWEEN + "mm_soft_emb_norm", "vision_residual", bias=False)
    return both.plus(tensors=tensors | {BETWEEN + "mm_input_projection_weight": "vision_residual* residual"})


@joined("mistral3", text="mistral", vision="pixtral")
def mistral3(c: Config, both: Family) -> Family:
    """Neighbouring patches are merged by a map from all of them, side by side."""
    merged = norm(BETWEEN + "norm", "vision_residual", bias=False)
    merged |= {BETWEEN + "patch_merger.merging_layer.weight": "projector_merged (vision_residual* patches)"}
    axes = {"projector_merged": Axis(both.axes["vision_residual"].size, Invertible())}
    axes |= _patches(c.size("spatial_merge_size", 2))
    bias = c.get("multimodal_projector_bias", False)
    return hidden_layer(c, both.plus(axes=axes, tensors=merged), "projector_merged*", bias=bias)


@joined("internvl", text="qwen2", vision="internvl_vision")
def internvl(c: Config, both: Family) -> Family:
    """Neighbouring patches stand side by side, behind a norm of all of them."""
    patches = patches_of(c.get("downsample_ratio", 0.5), "downsample_ratio")
    tensors = {BETWEEN + "layer_norm.weight": "(patches |vision_residual|)"}
    tensors |= {BETWEEN + "layer_norm.bias": "(patches vision_residual)"}
    return hidden_layer(c, both.plus(axes=patches, tensors=tensors), "(patches vision_residual*)")


CONNECTED = ("text_model.", "vision_model.", "connector.")


@joined("smolvlm", text="llama", vision="smolvlm_vision", at=CONNECTED, tied=False)
@joined("idefics3", text="llama", vision="idefics3_vision", at=CONNECTED, tied=False)
def idefics3(c: Config, both: Family) -> Family:
    maps = linear("connector.modality_projection.proj", "residual", "(patches vision_residual*)", bias=False)
    return both.plus(axes=_patches(c.size("scale_factor", 2)), tensors=maps)


def patches_of(ratio: float | int, key: str) -> dict[str, Axis]:
    """Those of a square that images are reduced by, by that ratio of its side; SpecError if it is none."""
    if not 1e-3 < ratio <= 1:
        raise SpecError(f"config.json: {key} is {ratio}, expected a number above 0, up to 1")
    return _patches(round(1 / ratio))


def _patches(side: int) -> dict[str, Axis]:
    """Those of a square, which a map reads side by side."""
    return {"patches": Axis(side**2)}
