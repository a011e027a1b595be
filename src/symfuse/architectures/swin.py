"""Swin: stages of pre-norm blocks whose attention sees windows, with a table of scores by distance for each head.

Between stages four neighbours are read side by side, behind a norm of all four, into a stream of twice the width.
"""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, feed_forward, linear, norm, norms, projections
from symfuse.architectures.parts import part_of, together
from symfuse.architectures.vit import MASK, image_axes
from symfuse.spec import Axis

LAYER = "blocks.{l}."
NAMES = projections(LAYER + "attention.", "self.query", "self.key", "self.value", "output.dense")
SHARED = ("distances",)


def _stage(c: Config, number: int, layers: int, heads: int) -> Family:
    """The blocks of one stage, and what leads to the next."""
    width, window = c.size("embed_dim", 96) * 2**number, c.size("window_size", 7)
    bias = "qkvo" if c.get("qkv_bias", True) else "o"
    axes = block_axes(layers, width, heads, int(width * c.get("mlp_ratio", 4.0)), c.get("hidden_act", "gelu"))
    blocks = Family(
        axes=axes | {"distances": Axis((2 * window - 1) ** 2)},
        tensors={
            **NAMES.tensors(bias=bias),
            LAYER + "attention.self.relative_position_bias_table": "distances h",
            **feed_forward(LAYER + "intermediate.dense", LAYER + "output.dense"),
            **norms(LAYER + "layernorm_before", LAYER + "layernorm_after"),
        },
        shifts=NAMES.shifts() if "k" in bias else (),
    )
    return part_of(blocks, f"encoder.layers.{number}.", f"stage{number}", SHARED)


def _merging(number: int) -> dict[str, str]:
    """Of four neighbours, after a stage."""
    at, stream = f"encoder.layers.{number}.downsample.", f"stage{number}_residual"
    return {
        at + "norm.weight": f"(4 |{stream}|)",
        at + "norm.bias": f"(4 {stream})",
        at + "reduction.weight": f"stage{number + 1}_residual (4 {stream}*)",
    }


@architecture("swin")
def swin(c: Config) -> Family:
    depths = c.side_by_side(depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24])
    family = together(*(_stage(c, i, *sizes) for i, sizes in enumerate(depths)))
    first, last = "stage0_residual", f"stage{len(depths) - 1}_residual"
    tokens = {name: text.replace("residual", first) for name, text in MASK.items()}
    tensors = {
        **linear("embeddings.patch_embeddings.projection", first, "channels height width"),
        **norm("embeddings.norm", first),
        **(
            {"embeddings.position_embeddings": f"1 positions {first}"}
            if c.get("use_absolute_embeddings", False)
            else {}
        ),
        **{name: text for i in range(len(depths) - 1) for name, text in _merging(i).items()},
        **norm("layernorm", last),
    }
    masked = c.class_name.endswith("ForMaskedImageModeling")
    pixels = Axis(c.size("encoder_stride", 32) ** 2 * c.size("num_channels", 3))
    return replace(
        family.plus(
            axes=image_axes(c, 0, patch=4) | {"labels": Axis(c.labels), "pixels": pixels},
            tensors=tensors | (tokens if masked else {}),
        ),
        prefix="swin.",
        optional={} if masked else {"mask token": tokens},
        heads={
            "classification": Head(("ForImageClassification",), linear("classifier", "labels", f"{last}*")),
            "masked image": Head(("ForMaskedImageModeling",), linear("decoder.0", "pixels", f"{last}* 1 1")),
        },
        outputs={"last_hidden_state": last, "pooler_output": last},
    )
