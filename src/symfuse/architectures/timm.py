"""The plain ViT and the distilled DeiT of timm, as `vit` and `deit`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from symfuse.architectures.base import Config
from symfuse.architectures.vit import LAYER, NAMES
from symfuse.errors import CheckpointError
from symfuse.io.naming import NAMINGS, Naming, Shapes, of_modules, require_usual

BODY = {"cls_token": ("embeddings.cls_token",), "pos_embed": ("embeddings.position_embeddings",)} | of_modules({
    "patch_embed.proj": ("embeddings.patch_embeddings.projection",), "norm": ("layernorm",),
    "blocks.{l}.norm1": (LAYER + "layernorm_before",), "blocks.{l}.norm2": (LAYER + "layernorm_after",),
    "blocks.{l}.attn.qkv": (NAMES["q"], NAMES["k"], NAMES["v"]), "blocks.{l}.attn.proj": (NAMES["o"],),
    "blocks.{l}.mlp.fc1": (LAYER + "intermediate.dense",), "blocks.{l}.mlp.fc2": (LAYER + "output.dense",),
})  # fmt: skip
DISTILLED = BODY | {"dist_token": ("embeddings.distillation_token",)}
HEAD = of_modules({"head": ("classifier",)})
HEADS = of_modules({"head": ("cls_classifier",), "head_dist": ("distillation_classifier",)})

# The heads of attention, which no tensor shows, of the plain models by the size in their names.
PLAIN = re.compile(r"(?:vit|deit)_([a-z]+)(?:_distilled)?_patch\d+_\d+(?:_in21k)?(?:\..*)?")
SIZES = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16, "giant": 16, "gigantic": 16}
# Arguments that say no more than the tensors, or act in training alone; and what others may be.
READ = (
    r"num_(classes|heads)|in_chans|img_size|patch_size|embed_dim|depth|mlp_ratio|qkv_bias|class_token|"
    r".*drop_rate|weight_init|dynamic_img_size|proj_bias|final_norm"
)
USUAL = {"global_pool": "token", "act_layer": "gelu", "pos_embed": "learn"}


def _config(config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    c, distilled = Config(config, "vit"), "dist_token" in shapes
    name, args = c.get("architecture", ""), c.get("model_args", {})
    require_usual({"global_pool": c.get("global_pool"), **args}, READ, USUAL)
    size = PLAIN.fullmatch(name)
    heads = c.get("model_args.num_heads", SIZES.get(size[1] if size else ""))
    hidden, channels, high, wide = shapes["patch_embed.proj.weight"]
    patches = shapes["pos_embed"][1] - (2 if distilled else 1)
    side = c.get("pretrained_cfg.input_size", [high * math.isqrt(patches)])[-1]
    height, width = c.under("model_args").pair("img_size", side)
    if heads is None or (height // high) * (width // wide) != patches:
        raise CheckpointError(f"{name} is no plain ViT or DeiT, or has other than {patches} patches")
    head = "DeiTForImageClassificationWithTeacher" if distilled else "ViTForImageClassification"
    labels = shapes.get("head.weight", (0,))[0]
    return {
        "model_type": "deit" if distilled else "vit", "hidden_size": hidden, "num_attention_heads": heads,
        "num_hidden_layers": sum(name.endswith("norm1.weight") for name in shapes),
        "intermediate_size": shapes["blocks.0.mlp.fc1.weight"][0], "layer_norm_eps": 1e-6,
        "image_size": [height, width], "patch_size": [high, wide], "num_channels": channels,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        **({"architectures": [head], "num_labels": labels} if labels else {}),  # without, there is no pooler either
    }  # fmt: skip


for prefix, body, heads in (("vit.", BODY, HEAD), ("deit.", DISTILLED, HEADS)):
    whole = {file: tuple(prefix + name for name in names) for file, names in body.items()}
    NAMINGS.append(Naming("timm", "architecture", whole | heads, _config))
