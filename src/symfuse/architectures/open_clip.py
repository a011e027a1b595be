"""The CLIP of open_clip with two transformers of its own, as OpenAI's, as `clip`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symfuse.architectures.base import Config
from symfuse.architectures.clip import EMBEDDINGS, LAYER, NAMES, TEXT_LAST, VISION_LAST
from symfuse.io.naming import NAMINGS, Naming, Shapes, of_modules, require_usual

BLOCK = "transformer.resblocks.{l}."
BLOCKS = {"positional_embedding": (EMBEDDINGS + "position_embedding.weight",)} | of_modules({
    BLOCK + "ln_1": (LAYER + "layer_norm1",), BLOCK + "ln_2": (LAYER + "layer_norm2",),
    BLOCK + "attn.out_proj": (NAMES["o"],), BLOCK + "mlp.c_fc": (LAYER + "mlp.fc1",),
    BLOCK + "mlp.c_proj": (LAYER + "mlp.fc2",),
})  # fmt: skip
BLOCKS |= {f"{BLOCK}attn.in_proj_{end}": tuple(f"{NAMES[at]}.{end}" for at in "qkv") for end in ("weight", "bias")}
VISION = BLOCKS | of_modules({"ln_pre": ("pre_layrnorm",), "ln_post": (VISION_LAST,)}) | {
    "class_embedding": (EMBEDDINGS + "class_embedding",), "conv1.weight": (EMBEDDINGS + "patch_embedding.weight",),
}  # fmt: skip
TEXT = BLOCKS | of_modules({"ln_final": (TEXT_LAST,)}) | {
    "token_embedding.weight": (EMBEDDINGS + "token_embedding.weight",),
}  # fmt: skip
TOWERS = {
    at + file: tuple(to + name for name in names)
    for at, to, tower in (("visual.", "vision_model.", VISION), ("", "text_model.", TEXT))
    for file, names in tower.items()
}
TRANSPOSED = {"visual.proj": ("visual_projection.weight",), "text_projection": ("text_projection.weight",)}

# Settings that say no more than the tensors, or act in training alone; and what others may be.
READ = r"image_size|layers|(head_)?width|patch_(size|dropout)|mlp_ratio|context_length|vocab_size|heads"
OF_ALL = r"embed_dim|(vision|text)_cfg|quick_gelu|init_logit_scale"
END = {"eos_token_id": 2}  # by which `transformers` reads the token with the largest number, as open_clip does


def _tower(shapes: Shapes, at: str, heads: int, act: str) -> dict[str, Any]:
    return {
        "hidden_size": shapes[at + "positional_embedding"][1], "num_attention_heads": heads, "hidden_act": act,
        "intermediate_size": shapes[f"{at}transformer.resblocks.0.mlp.c_fc.weight"][0],
        "num_hidden_layers": sum(name.startswith(f"{at}trans") and name.endswith("ln_1.weight") for name in shapes),
    }  # fmt: skip


def _config(config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    c = Config(config, "clip").under("model_cfg")
    require_usual(config["model_cfg"] or {}, OF_ALL, {})
    require_usual(c.get("vision_cfg", {}), READ, {"pool_type": "tok"})
    require_usual(c.get("text_cfg", {}), READ, {"pool_type": "argmax"})
    act = "quick_gelu" if c.get("quick_gelu", False) else "gelu"
    width, channels, side, _ = shapes["visual.conv1.weight"]
    image = {"image_size": c.under("vision_cfg").size("image_size", 224), "patch_size": side, "num_channels": channels}
    (tokens, _), (positions, _) = shapes["token_embedding.weight"], shapes["positional_embedding"]
    words = {"vocab_size": tokens, "max_position_embeddings": positions}
    vision, text = width // c.under("vision_cfg").size("head_width", 64), c.under("text_cfg").size("heads", 8)
    return {
        "model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": shapes["text_projection"][1],
        "text_config": {"model_type": "clip_text_model", **_tower(shapes, "", text, act), **words, **END},
        "vision_config": {"model_type": "clip_vision_model", **_tower(shapes, "visual.", vision, act), **image},
    }  # fmt: skip


ENDS = {"logit_scale": ("logit_scale",), **TRANSPOSED}
NAMINGS.append(Naming("open_clip", "model_cfg", TOWERS | ENDS, _config, TRANSPOSED, "open_clip_config.json"))
