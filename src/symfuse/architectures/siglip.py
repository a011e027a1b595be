"""SigLIP and SigLIP 2: CLIP without its projections; the image encoder ends in attention of a probe to all patches.

The probe is read as the stream is, by the same fused map, so that it moves with it. Its norm's gain is for the patches
alone, and so cannot be folded: only permutations act on that stream. What the pooling head puts out is the space in
which images and texts meet.
"""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import linear, norm, size_of_head
from symfuse.architectures.clip import (
    EMBEDDINGS,
    READS,
    SHARED,
    TEXT_LAST,
    VISION_LAST,
    classifier,
    text_tower,
    vision_tower,
)
from symfuse.architectures.parts import part_of, together
from symfuse.groups import Invertible, Permutation
from symfuse.spec import Axis, Shift

SIZES = (12, 768, 3072, 12)
ACT = "gelu_pytorch_tanh"
POOL = "head."
FUSED = "(pool_h pool_qk + pool_h pool_qk* + pool_h pool_v)"
POOLING = {
    POOL + "probe": "1 1 residual",
    POOL + "attention.in_proj_weight": f"{FUSED} residual*",
    POOL + "attention.in_proj_bias": FUSED,
    **linear(POOL + "attention.out_proj", "projection", "(pool_h pool_v*)"),
    **norm(POOL + "layernorm", "projection"),
    **linear(POOL + "mlp.fc1", "pool_ffn", "projection*"),
    **linear(POOL + "mlp.fc2", "projection", "pool_ffn*"),
}
POOLING_SHIFTS = (
    Shift(POOL + "attention.in_proj_bias", "pool_qk*"),
    Shift(
        POOL + "attention.in_proj_bias", "pool_v", POOL + "attention.out_proj.weight", POOL + "attention.out_proj.bias"
    ),
)
OUTPUTS = {"last_hidden_state": "residual", "pooler_output": "projection"}


def _text(c: Config) -> Family:
    size = c.size("projection_size", c.size("hidden_size", SIZES[1]))
    tower = text_tower(c, SIZES, 32000, 64, ACT, Axis(size, Permutation()))
    reads = {TEXT_LAST + ".weight": ("last_hidden_state", "head.weight")}
    return replace(tower.plus(tensors=linear("head", "projection"), reads=reads), outputs=OUTPUTS)


def _vision(c: Config) -> Family:
    projection = Axis(c.size("hidden_size", SIZES[1]), Permutation())
    tower = vision_tower(c, SIZES, 16, ACT, projection, tokens=0)
    tower = replace(tower.plus(tensors={EMBEDDINGS + "patch_embedding.bias": "residual"}), outputs=OUTPUTS)
    if not c.get("vision_use_head", True):
        return replace(tower, reads=READS | {VISION_LAST + ".weight": ("last_hidden_state",)})
    heads = tower.axes["h"].size
    inside = Axis(size_of_head(projection.size, heads), Invertible(), ("pool_h",))
    axes = {"pool_h": Axis(heads, Permutation()), "pool_qk": inside, "pool_v": inside}
    axes["pool_ffn"] = replace(tower.axes["ffn"], per=())
    return replace(tower.plus(axes=axes, tensors=POOLING), shifts=tower.shifts + POOLING_SHIFTS)


@architecture("siglip_text_model", "siglip2_text_model")
def siglip_text(c: Config) -> Family:
    return _text(c)


@architecture("siglip_vision_model")
def siglip_vision(c: Config) -> Family:
    return _vision(c)


@architecture("idefics3_vision", "smolvlm_vision")
def idefics3_vision(c: Config) -> Family:
    """Without the attention of a probe; images of any shape, with places by their share of it."""
    family = vision_tower(c, (12, 1152, 3072, 16), 32, ACT, Axis(1), tokens=0)
    reads = READS | {VISION_LAST + ".weight": ("last_hidden_state",)}
    family = family.plus(tensors={EMBEDDINGS + "patch_embedding.bias": "residual"}, reads=reads)
    return replace(family, outputs={"last_hidden_state": "residual"})


@architecture("siglip2_vision_model")
def siglip2_vision(c: Config) -> Family:
    """Images of any shape, cut into patches beforehand; one table of places is resized to each."""
    size = c.size("patch_size", 16)
    pixels = Axis(c.size("num_channels", 3) * size**2)
    patches = {EMBEDDINGS + "patch_embedding.weight": "residual pixels"}
    return _vision(c).plus(axes={"pixels": pixels, "positions": Axis(c.size("num_patches", 256))}, tensors=patches)


def _both(c: Config, vision: Family) -> Family:
    """The model of both towers, or a classifier of images."""
    vision = part_of(vision, "vision_model.", "vision", SHARED)
    if c.class_name.endswith("ForImageClassification"):
        last = {f"vision_model.{VISION_LAST}.weight": ("classifier.weight",)} if vision.reads else {}
        return classifier(c, vision).plus(reads=last)
    both = together(part_of(_text(c.under("text_config")), "text_model.", "text", SHARED), vision)
    both = both.plus(tensors={"logit_scale": "1", "logit_bias": "1"})
    return replace(both, outputs={"text_embeds": "projection", "image_embeds": "projection"})


@architecture("siglip")
def siglip(c: Config) -> Family:
    return _both(c, _vision(c.under("vision_config")))


@architecture("siglip2")
def siglip2(c: Config) -> Family:
    return _both(c, siglip2_vision(c.under("vision_config")))
