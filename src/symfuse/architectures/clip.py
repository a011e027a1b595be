"""CLIP: a text and an image encoder, pre-norm, whose outputs meet in one space, `projection`.

There cosines are taken, so that it may be turned: `text_embeds` and `image_embeds` turn with it, the logits stay. The
stream of the image encoder begins with a norm, whose gain nothing linear reads: only permutations act on it.
"""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, feed_forward, linear, norm, norms, projections
from symfuse.architectures.parts import part_of, together
from symfuse.groups import Orthogonal
from symfuse.spec import Axis

LAYER = "encoder.layers.{l}."
NAMES = projections(LAYER + "self_attn.", "q_proj", "k_proj", "v_proj", "out_proj")
EMBEDDINGS = "embeddings."
TEXT_LAST, VISION_LAST = "final_layer_norm", "post_layernorm"

LAYERS = {
    **NAMES.tensors(),
    **feed_forward(LAYER + "mlp.fc1", LAYER + "mlp.fc2"),
    **norms(LAYER + "layer_norm1", LAYER + "layer_norm2"),
}
READS = {LAYER + "layer_norm1.weight": NAMES.readers, LAYER + "layer_norm2.weight": (LAYER + "mlp.fc1.weight",)}
SHIFTS = NAMES.shifts()
BUFFERS = ("*embeddings.position_ids",)
OUTPUTS = {"last_hidden_state": "residual", "pooler_output": "residual"}
SHARED = ("projection", "vocab", "channels", "patch")  # axes of one tower only, or of both

# What `transformers` takes for sizes that a config does not say: layers, width, neurons, heads.
TEXT_SIZES, VISION_SIZES = (12, 512, 2048, 8), (12, 768, 3072, 12)


def encoder_axes(c: Config, usual: tuple[int, int, int, int], act: str) -> dict[str, Axis]:
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    layers, hidden, ffn, heads = (c.size(key, size) for key, size in zip(keys, usual, strict=True))
    return block_axes(layers, hidden, heads, ffn, c.get("hidden_act", act))


def text_tower(
    c: Config, usual: tuple[int, int, int, int], words: int, positions: int, act: str, projection: Axis
) -> Family:
    """words, positions: what `transformers` takes where the config does not say."""
    return Family(
        axes=encoder_axes(c, usual, act)
        | {
            "vocab": Axis(c.size("vocab_size", words)),
            "positions": Axis(c.size("max_position_embeddings", positions)),
            "projection": projection,
        },
        tensors={
            EMBEDDINGS + "token_embedding.weight": "vocab residual",
            EMBEDDINGS + "position_embedding.weight": "positions residual",
            **LAYERS,
            **norm(TEXT_LAST),
        },
        prefix="text_model.",
        buffers=BUFFERS,
        shifts=SHIFTS,
        outputs=OUTPUTS,
        reads=READS | {TEXT_LAST + ".weight": tuple(OUTPUTS)},
    )


def vision_tower(
    c: Config, usual: tuple[int, int, int, int], side: int, act: str, projection: Axis, tokens: int
) -> Family:
    """side: of a patch, where the config does not say. tokens: those that are no patches, one position each."""
    patch = c.size("patch_size", side)
    return Family(
        axes=encoder_axes(c, usual, act)
        | {
            "positions": Axis((c.size("image_size", 224) // patch) ** 2 + tokens),
            "channels": Axis(c.size("num_channels", 3)),
            "patch": Axis(patch),
            "projection": projection,
        },
        tensors={
            EMBEDDINGS + "patch_embedding.weight": "residual channels patch patch",
            EMBEDDINGS + "position_embedding.weight": "positions residual",
            **LAYERS,
            **norm(VISION_LAST),
        },
        prefix="vision_model.",
        buffers=BUFFERS,
        shifts=SHIFTS,
        outputs=OUTPUTS,
    )


def _projection(c: Config) -> Axis:
    return Axis(c.size("projection_dim", 512), Orthogonal())


def _text(c: Config, projection: Axis) -> Family:
    return text_tower(c, TEXT_SIZES, 49408, 77, "quick_gelu", projection)


def _vision(c: Config, projection: Axis) -> Family:
    tower = vision_tower(c, VISION_SIZES, 32, "quick_gelu", projection, tokens=1)
    first = {EMBEDDINGS + "class_embedding": "residual", **norm("pre_layrnorm")}
    return replace(tower, tensors=first | dict(tower.tensors))


def _projected(c: Config, tower: Family, output: str, weight: str) -> Family:
    """A tower, as its class with a projection has it: under a name of its own beside that."""
    if not c.class_name.endswith("WithProjection"):
        return tower
    return replace(
        part_of(tower, tower.prefix).plus(tensors={weight: "projection residual*"}),
        outputs={output: "projection", "last_hidden_state": "residual"},
        reads={},  # what the last norm puts out, is put out by the model
    )


@architecture("clip_text_model")
def clip_text(c: Config) -> Family:
    return _projected(c, _text(c, _projection(c)), "text_embeds", "text_projection.weight")


@architecture("clip_vision_model")
def clip_vision(c: Config) -> Family:
    return _projected(c, _vision(c, _projection(c)), "image_embeds", "visual_projection.weight")


@architecture("clip")
def clip(c: Config) -> Family:
    vision = part_of(_vision(c.under("vision_config"), _projection(c)), "vision_model.", "vision", SHARED)
    if c.class_name.endswith("ForImageClassification"):
        return classifier(c, vision)
    text = part_of(_text(c.under("text_config"), _projection(c)), "text_model.", "text", SHARED)
    projections = {
        "text_projection.weight": "projection text_residual*",
        "visual_projection.weight": "projection vision_residual*",
        "logit_scale": "()",
    }
    reads = {f"text_model.{TEXT_LAST}.weight": ("text_projection.weight",)}
    both = together(text, vision).plus(tensors=projections, reads=reads)
    return replace(both, outputs={"text_embeds": "projection", "image_embeds": "projection"})


def classifier(c: Config, vision: Family) -> Family:
    """An image encoder and what reads the mean of its patches."""
    head = Head(("ForImageClassification",), linear("classifier", "labels", "vision_residual*"))
    return vision.plus(axes={"labels": Axis(c.labels)}, heads={"classification": head})
