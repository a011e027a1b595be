"""The ViT and the distilled DeiT of timm (`VisionTransformer`, `VisionTransformerDistilled`) as `vit` and `deit`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from symfuse.architectures.vit import LAYER, NAMES
from symfuse.errors import CheckpointError
from symfuse.io.naming import NAMINGS, Naming, Shapes, of_modules

MODULES = {
    "patch_embed.proj": ("embeddings.patch_embeddings.projection",),
    "blocks.{l}.norm1": (LAYER + "layernorm_before",),
    "blocks.{l}.attn.qkv": (NAMES["q"], NAMES["k"], NAMES["v"]),
    "blocks.{l}.attn.proj": (NAMES["o"],),
    "blocks.{l}.norm2": (LAYER + "layernorm_after",),
    "blocks.{l}.mlp.fc1": (LAYER + "intermediate.dense",),
    "blocks.{l}.mlp.fc2": (LAYER + "output.dense",),
    "norm": ("layernorm",),
}
VECTORS = {"cls_token": ("embeddings.cls_token",), "pos_embed": ("embeddings.position_embeddings",)}
DISTILLED = {"dist_token": ("embeddings.distillation_token",)}
OPTIONAL = tuple(of_modules({"head": (), "head_dist": ()})) + ("blocks.{l}.attn.qkv.bias",)

# The plain models, by the size in their name: the number of heads, which is in no tensor.
PLAIN = re.compile(r"(?:vit|deit)_([a-z]+)(?:_distilled)?_patch\d+_\d+(?:_in21k)?(?:\..*)?")
HEADS = {"tiny": 3, "small": 6, "medium": 8, "base": 12, "large": 16, "huge": 16, "giant": 16, "gigantic": 16}
# Arguments that say no more than the tensors, or act in training alone; of the others only those that are not set.
READ = re.compile(
    r"num_(classes|heads)|in_chans|img_size|patch_size|embed_dim|depth|mlp_ratio|qkv_bias|global_pool|class_token|"
    r".*drop_rate|weight_init|dynamic_img_size|act_layer|pos_embed|proj_bias|final_norm"
)
ACTIVATIONS = {None: "gelu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"} | {
    name: name for name in ("relu", "silu", "tanh")
}


def _config(model_type: str, head: str, config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The config of `transformers`. head: its class with a head."""
    name, args = str(config["architecture"]), config.get("model_args") or {}
    size = match[1] if (match := PLAIN.fullmatch(name)) else ""
    heads = args.get("num_heads", HEADS.get(size))
    if heads is None:
        raise CheckpointError(f"{name} is no plain ViT or DeiT")
    pool = args.get("global_pool", config.get("global_pool", "token"))
    others = [key for key, value in args.items() if value and not READ.fullmatch(key)]
    if pool != "token" or others or args.get("act_layer") not in ACTIVATIONS:
        raise CheckpointError(f"global_pool is {pool!r}, and model_args has {others or args.get('act_layer')}")
    hidden, channels, high, wide = shapes["patch_embed.proj.weight"]
    labels = shapes.get("head.weight", (0,))[0]
    side = (config.get("pretrained_cfg") or {}).get("input_size")
    patches = shapes["pos_embed"][1] - (2 if "dist_token" in shapes else 1)
    image = args.get("img_size") or (list(side[1:]) if side else [high * math.isqrt(patches)] * 2)
    image = [image, image] if isinstance(image, int) else list(image)
    if (image[0] // high) * (image[1] // wide) != patches:
        raise CheckpointError(f"pos_embed has {patches} patches, and an image of {image} has others")
    return {
        "model_type": model_type,
        **({"architectures": [head], "num_labels": labels} if labels else {}),  # without, there is no pooler either
        "hidden_size": hidden,
        "num_hidden_layers": sum(name.endswith("norm1.weight") for name in shapes),
        "num_attention_heads": heads,
        "intermediate_size": shapes["blocks.0.mlp.fc1.weight"][0],
        "hidden_act": ACTIVATIONS[args.get("act_layer")],
        "layer_norm_eps": 1e-6,
        "image_size": image,
        "patch_size": [high, wide],
        "num_channels": channels,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
    }


def _naming(model_type: str, head: str, vectors: Mapping[str, tuple[str, ...]], *heads: str) -> Naming:
    """heads: the classifiers in `transformers`."""
    body = {**vectors, **of_modules(MODULES)}
    body = {file: tuple(f"{model_type}.{one}" for one in names) for file, names in body.items()}
    classifiers = {file: (name,) for file, name in zip(("head", "head_dist"), heads, strict=False)}

    def translate(config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
        return _config(model_type, head, config, shapes)

    return Naming("timm", "architecture", body | of_modules(classifiers), translate, OPTIONAL)


NAMINGS += [
    _naming("vit", "ViTForImageClassification", VECTORS, "classifier"),
    _naming(
        "deit",
        "DeiTForImageClassificationWithTeacher",
        VECTORS | DISTILLED,
        "cls_classifier",
        "distillation_classifier",
    ),
]
