"""Small reference networks with the names that timm and open_clip publish, and folders as these libraries save them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SIZES = {"img_size": [12, 20], "patch_size": [4, 5], "embed_dim": 20, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
VISION = {"image_size": 12, "patch_size": 4, "width": 20, "head_width": 5, "layers": 2}
TEXT = {"context_length": 7, "vocab_size": 61, "width": 24, "heads": 6, "layers": 3}
MODEL = {"embed_dim": 11, "vision_cfg": VISION, "text_cfg": TEXT, "quick_gelu": True}


def timm_config(architecture: str = "vit_tiny_patch16_224", **more: Any) -> dict[str, Any]:
    """As timm's `save_for_hf` writes it, of a model that is smaller than its name says."""
    args = {"num_classes": 7, "in_chans": 3, "global_pool": "token", **SIZES}
    pretrained = {"input_size": [3, 12, 20], "classifier": "head"}
    return {
        "architecture": architecture, "num_classes": 7, "num_features": 20, "global_pool": "token", "model_args": args,
        "pretrained_cfg": pretrained, **more,
    }  # fmt: skip


class TimmViT(nn.Module):
    """`VisionTransformer` of timm; distilled: `VisionTransformerDistilled`."""

    def __init__(self, distilled: bool = False, biased: bool = True, classes: int = 7) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, 20))
        if distilled:
            self.dist_token = nn.Parameter(torch.empty(1, 1, 20))
            self.head_dist = nn.Linear(20, classes)
        self.pos_embed = nn.Parameter(torch.empty(1, 14 if distilled else 13, 20))
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, 20, (4, 5), (4, 5))
        self.blocks = nn.ModuleList(_TimmBlock(biased) for _ in range(2))
        self.norm = nn.LayerNorm(20, eps=1e-6)
        self.head = nn.Linear(20, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = [getattr(self, name) for name in ("cls_token", "dist_token") if hasattr(self, name)]
        x = self.patch_embed.proj(images).flatten(2).mT
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in tokens), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x[:, 0])
        return logits if len(tokens) == 1 else (logits + self.head_dist(x[:, 1])) / 2


class _TimmBlock(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(20, eps=1e-6), nn.LayerNorm(20, eps=1e-6)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(20, 60, bias=biased), nn.Linear(20, 20)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(20, 30), nn.Linear(30, 20)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn.qkv(self.norm1(x)).unflatten(-1, (3, 4, 5)).permute(2, 0, 3, 1, 4)
        y = ((q @ k.mT / 5**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.attn.proj(y)
        moved: Tensor = x + self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(x))))
        return moved


class OpenClip(nn.Module):
    """`CLIP` of open_clip: the logits of images over texts."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.class_embedding = nn.Parameter(torch.empty(20))
        self.visual.positional_embedding = nn.Parameter(torch.empty(10, 20))
        self.visual.proj = nn.Parameter(torch.empty(20, 11))
        self.visual.conv1 = nn.Conv2d(3, 20, 4, 4, bias=False)
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(20), nn.LayerNorm(20)
        self.visual.transformer = _Blocks(20, 4, 2)
        self.positional_embedding = nn.Parameter(torch.empty(7, 24))
        self.text_projection = nn.Parameter(torch.empty(24, 11))
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.transformer = _Blocks(24, 6, 3)
        self.token_embedding = nn.Embedding(61, 24)
        self.ln_final = nn.LayerNorm(24)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        x = self.visual.conv1(images).flatten(2).mT
        x = torch.cat([self.visual.class_embedding.expand(len(x), 1, -1), x], 1) + self.visual.positional_embedding
        x = self.visual.transformer(self.visual.ln_pre(x), None)
        image = self.visual.ln_post(x[:, 0]) @ self.visual.proj
        causal = torch.full((7, 7), -torch.inf).triu(1)
        y = self.ln_final(self.transformer(self.token_embedding(words) + self.positional_embedding, causal))
        text = y[torch.arange(len(y)), words.argmax(-1)] @ self.text_projection
        one, two = (nn.functional.normalize(part, dim=-1) for part in (image, text))
        return self.logit_scale.exp() * one @ two.mT


class _Blocks(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList()
        for _ in range(layers):
            block = nn.Module()
            block.ln_1, block.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            block.attn = nn.MultiheadAttention(width, heads, batch_first=True)
            block.mlp = nn.Module()
            block.mlp.c_fc, block.mlp.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.resblocks.append(block)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.resblocks:
            y = block.ln_1(x)
            x = x + block.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
            y = block.mlp.c_fc(block.ln_2(x))
            x = x + block.mlp.c_proj(y * torch.sigmoid(1.702 * y))
        return x


def random(module: nn.Module, seed: int) -> nn.Module:
    """With random gains and biases too, in float64."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = 0.3 * drawn + (0.5 if parameter.dim() == 1 else 0)
    return module.eval()


def saved(module: nn.Module, folder: Path, config: Mapping[str, Any]) -> Path:
    """A folder as the library of this config writes it."""
    folder.mkdir()
    stem, file = ("open_clip_model", "open_clip_config.json") if "model_cfg" in config else ("model", "config.json")
    save_file(
        {name: tensor.contiguous() for name, tensor in module.state_dict().items()}, folder / f"{stem}.safetensors"
    )
    (folder / file).write_text(json.dumps(config), "utf-8")
    return folder
