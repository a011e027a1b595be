"""The CLIP of open_clip (`CLIP` with two transformers of its own, as OpenAI's) as `clip`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symfuse.architectures.clip import EMBEDDINGS, LAYER, NAMES, TEXT_LAST, VISION_LAST
from symfuse.errors import CheckpointError
from symfuse.io.naming import NAMINGS, Naming, Shapes, of_modules

BLOCK = "transformer.resblocks.{l}."
MODULES = {
    BLOCK + "ln_1": (LAYER + "layer_norm1",),
    BLOCK + "attn.out_proj": (NAMES["o"],),
    BLOCK + "ln_2": (LAYER + "layer_norm2",),
    BLOCK + "mlp.c_fc": (LAYER + "mlp.fc1",),
    BLOCK + "mlp.c_proj": (LAYER + "mlp.fc2",),
}
BLOCKS = of_modules(MODULES) | {
    f"{BLOCK}attn.in_proj_{end}": tuple(f"{NAMES[at]}.{end}" for at in "qkv") for end in ("weight", "bias")
}
VISION = {
    "class_embedding": (EMBEDDINGS + "class_embedding",),
    "positional_embedding": (EMBEDDINGS + "position_embedding.weight",),
    "conv1.weight": (EMBEDDINGS + "patch_embedding.weight",),
    **of_modules({"ln_pre": ("pre_layrnorm",)}),
    **BLOCKS,
    **of_modules({"ln_post": (VISION_LAST,)}),
}
TEXT = {
    "positional_embedding": (EMBEDDINGS + "position_embedding.weight",),
    "token_embedding.weight": (EMBEDDINGS + "token_embedding.weight",),
    **BLOCKS,
    **of_modules({"ln_final": (TEXT_LAST,)}),
}
TRANSPOSED = {"visual.proj": ("visual_projection.weight",), "text_projection": ("text_projection.weight",)}
OWN = {"logit_scale": ("logit_scale",)}

# Settings that the tensors show, or without effect on them; of the others only those with this value, or not set.
READ = {
    "vision_cfg": ("image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio", "patch_dropout"),
    "text_cfg": ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"),
}
USUAL = {"pool_type": ("tok", "argmax"), "final_ln_after_pool": (False,), "pad_id": (0,)}


def _towers(shapes: Shapes, at: str, heads: int, act: str) -> dict[str, Any]:
    """What both encoders have."""
    return {
        "hidden_size": shapes[at + "positional_embedding"][1],
        "intermediate_size": shapes[f"{at}transformer.resblocks.0.mlp.c_fc.weight"][0],
        "num_hidden_layers": sum(name.startswith(at + "transformer.") and name.endswith("ln_1.weight") for name in shapes),
        "num_attention_heads": heads,
        "hidden_act": act,
    }


def _config(config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    model = config["model_cfg"]
    parts = {key: model.get(key) or {} for key in READ}
    others = [
        f"{part}.{key}: {value!r}"
        for part, settings in parts.items()
        for key, value in settings.items()
        if value and key not in READ[part] and value not in USUAL.get(key, ())
    ]
    if others:
        raise CheckpointError(f"{others[0]} is not known")
    act = "quick_gelu" if model.get("quick_gelu") else "gelu"
    words, projection = shapes["token_embedding.weight"][0], shapes["text_projection"][1]
    width, channels, patch, _ = shapes["visual.conv1.weight"]
    vision = _towers(shapes, "visual.", width // parts["vision_cfg"].get("head_width", 64), act)
    text = _towers(shapes, "", parts["text_cfg"].get("heads", 8), act)
    return {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": projection,
        "text_config": text
        | {
            "model_type": "clip_text_model",
            "vocab_size": words,
            "max_position_embeddings": shapes["positional_embedding"][0],
            "eos_token_id": 2,  # the token with the largest number is read, as open_clip does
        },
        "vision_config": vision
        | {
            "model_type": "clip_vision_model",
            "image_size": parts["vision_cfg"].get("image_size", 224),
            "patch_size": patch,
            "num_channels": channels,
        },
    }


NAMINGS.append(
    Naming(
        "open_clip",
        "model_cfg",
        {f"visual.{file}": tuple(f"vision_model.{one}" for one in names) for file, names in VISION.items()}
        | {file: tuple(f"text_model.{one}" for one in names) for file, names in TEXT.items()}
        | TRANSPOSED
        | OWN,
        _config,
        transposed=tuple(TRANSPOSED),
        file="open_clip_config.json",
    )
)
