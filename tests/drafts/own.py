"""Modules as people write them, of classes that symfuse has never seen: in the manner of nanoGPT, timm and
x-transformers, and one of raw parameters whose names mean nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY, WIDTH, HEADS, NEURONS, LENGTH, LAYERS = 61, 24, 4, 29, 19, 2


class CausalSelfAttention(nn.Module):
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        seen: Tensor = self.c_proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(*x.shape))
        return seen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention()
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, NEURONS), "c_proj": nn.Linear(NEURONS, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        added: Tensor = x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return added


class GPT(nn.Module):
    """In the manner of nanoGPT: a fused projection, a mask that is a buffer, a tied head; a tuple with None."""

    def __init__(self) -> None:
        super().__init__()
        tables = {"wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH)}
        blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.transformer = nn.ModuleDict({**tables, "h": blocks, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        seen: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return seen


class VisionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(WIDTH), Attention(), LayerScale()
        self.norm2, self.ls2 = nn.LayerNorm(WIDTH), LayerScale()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, NEURONS), nn.GELU(), nn.Linear(NEURONS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        added: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return added


class VisionTransformer(nn.Module):
    """In the manner of timm: patches, a class token, LayerScale; a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.img_size = (12, 12)
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 10, WIDTH))
        self.blocks = nn.Sequential(*(VisionBlock() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.g, self.scale = nn.Parameter(torch.zeros(width)), width**0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * (self.g + 1)


class Grouped(nn.Module):
    """Six queries and two keys; rotary positions of neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(width, 48, bias=False), nn.Linear(48, width, bias=False)
        self.to_k, self.to_v = nn.Linear(width, 16, bias=False), nn.Linear(width, 16, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (to(x).unflatten(-1, (-1, 8)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        q, k = (t * angles.cos() + _turned(t) * angles.sin() for t in (q, k))
        k, v = (t.repeat_interleave(3, 1) for t in (k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * 8**-0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.finfo(scores.dtype).max).softmax(-1)
        seen: Tensor = self.to_out(torch.einsum("bhij,bhjd->bhid", shares, v).transpose(1, 2).flatten(2))
        return seen


def _turned(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(width, 2 * NEURONS), nn.Linear(NEURONS, width)

    def forward(self, x: Tensor, _angles: Tensor) -> Tensor:
        up, gate = self.proj(x).chunk(2, -1)
        added: Tensor = self.out(up * F.silu(gate))
        return added


class TransformerWrapper(nn.Module):
    """In the manner of x-transformers: one list in which attention and feed-forward alternate, gains stored less 1."""

    inv_freq: Tensor

    def __init__(self, width: int = 23) -> None:
        super().__init__()
        self.token_emb, self.to_logits = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        parts = ((Norm(width), Gated(width) if i % 2 else Grouped(width)) for i in range(2 * LAYERS))
        self.attn_layers = nn.ModuleList(nn.ModuleList(pair) for pair in parts)
        self.final_norm = Norm(width)
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(4) / 4))

    def forward(self, x: Tensor) -> Tensor:
        angles = (torch.arange(x.shape[1])[:, None] * self.inv_freq).repeat_interleave(2, -1)
        x = self.token_emb(x)
        for pair in self.attn_layers:
            norm, block = pair
            x = x + block(norm(x), angles)
        logits: Tensor = self.to_logits(self.final_norm(x))
        return logits


class Nameless(nn.Module):
    """Raw parameters, stored [in, out], whose names mean nothing; a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        maps = dict.fromkeys("abce", (WIDTH, WIDTH)) | {"f": (WIDTH, NEURONS), "i": (NEURONS, WIDTH)}
        shapes = maps | dict.fromkeys("jpq", (WIDTH,)) | {"g": (NEURONS,)}
        self.t, self.w = nn.Parameter(torch.randn(31, WIDTH)), nn.Parameter(torch.randn(WIDTH, 5))
        self.units = nn.ModuleList(
            nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
            for _ in range(LAYERS)
        )

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.t[ids]
        for u in self.units:
            y = _normed(x) * u["p"]
            q, k, v = ((y @ u[n]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "abc")
            x = x + (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(-2) @ u["e"]
            y = _normed(x) * u["q"]
            x = x + torch.relu(y @ u["f"] + u["g"]) @ u["i"] + u["j"]
        return {"scores": x @ self.w, "hidden": x}


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
