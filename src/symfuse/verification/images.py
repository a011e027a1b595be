"""Random images for models that read them among the words of a text, and the placeholders that stand for them there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech)\w*token_(id|index)")  # for what is no text

IMAGES = (2, 3)  # the height and width of images of any shape, in merged patches


def image_token(module: torch.nn.Module, config: Mapping[str, Any]) -> int | None:
    """The token that stands for a part of an image; None if the module takes no images among words."""
    keys = ("image_token_id", "image_token_index")
    tokens = [n for key in keys if type(n := config.get(key)) is int] if hasattr(module, "get_image_features") else []
    return tokens[0] if tokens else None


def with_images(
    module: torch.nn.Module, config: Mapping[str, Any], inputs: Mapping[str, Tensor], rng: torch.Generator
) -> dict[str, Tensor]:
    """The texts `input_ids` [N, L] with `attention_mask`, and an image in each behind its first token."""
    token, ids, mask = image_token(module, config), inputs["input_ids"].clone(), inputs["attention_mask"]
    assert token is not None
    for other in (n for key, n in config.items() if PLACEHOLDER.fullmatch(key) and type(n) is int):
        ids[ids == other] = 0
    images = _images(module, config, len(ids), rng)
    count = _features(module, images) // len(ids)
    there = torch.full((len(ids), count), token)
    ids = torch.cat([ids[:, :1], there, ids[:, 1:]], 1)
    out = {"input_ids": ids, "attention_mask": torch.cat([torch.ones_like(there), mask], 1), **images}
    takes = inspect.signature(module.forward).parameters
    kinds = [name for name in ("mm_token_type_ids", "token_type_ids") if name in takes]
    return out | {name: (ids == token).long() for name in kinds}


def _features(module: Any, images: Mapping[str, Tensor]) -> int:
    """How many vectors, and so how many placeholders, the images are."""
    with torch.inference_mode():
        found = module.get_image_features(**images)
    pooled = getattr(found, "pooler_output", None)
    found = getattr(found, "last_hidden_state", found) if pooled is None else pooled
    every = [found] if isinstance(found, Tensor) else list(found)
    return sum(one.numel() // one.shape[-1] for one in every)


def _images(module: Any, config: Mapping[str, Any], batch: int, rng: torch.Generator) -> dict[str, Tensor]:
    vision, dtype = config["vision_config"], next(module.parameters()).dtype
    takes = inspect.signature(module.forward).parameters
    if "image_grid_thw" in takes:
        return _cut(vision, batch, rng, dtype)
    channels, size = vision.get("num_channels", 3), vision.get("image_size", 224)
    shape = [size, size] if isinstance(size, int) else list(size)
    tiles: list[int] = []
    sizes = {}
    if pinpoints := config.get("image_grid_pinpoints"):  # an image is cut into tiles, and is seen as a whole too
        sizes = {"image_sizes": torch.tensor([pinpoints[0]] * batch)}
        tiles = [1 + (pinpoints[0][0] // shape[0]) * (pinpoints[0][1] // shape[1])]
    elif "pixel_attention_mask" in takes:
        tiles = [1]
    elif "image_sizes" in takes and _encoder_takes(module, "image_sizes"):
        sizes = {"image_sizes": torch.tensor([shape] * batch)}
    return {"pixel_values": torch.randn(batch, *tiles, channels, *shape, generator=rng, dtype=dtype), **sizes}


def _cut(vision: Mapping[str, Any], batch: int, rng: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Images of two shapes, cut into patches in time, height and width (Qwen2-VL)."""
    high, wide = (side * vision["spatial_merge_size"] for side in IMAGES)
    grid = torch.tensor([[1, high, wide] if i % 2 else [1, wide, high] for i in range(batch)])
    numbers = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    pixels = torch.randn(int(grid.prod(1).sum()), numbers, generator=rng, dtype=dtype)
    return {"pixel_values": pixels, "image_grid_thw": grid}


def _encoder_takes(module: Any, name: str) -> bool:
    config = module.config.vision_config
    encoder = next((part for part in module.modules() if getattr(part, "config", None) is config), None)
    return encoder is not None and name in inspect.signature(encoder.forward).parameters
