"""Tiny models of the classes that the peers know, and random permutations of them."""

from __future__ import annotations

import random
from typing import Any

import spaces
import torch
import transformers
from torch import Tensor, nn

from contract.tiny import GPT2, TEXT, VISION

HEADS = 4
KINDS = {"bert": "BertForMaskedLM", "vit": "ViTForImageClassification", "gpt2": "GPT2LMHeadModel"}
CONFIGS: dict[str, dict[str, Any]] = {"bert": TEXT, "vit": VISION, "gpt2": GPT2}


def tiny(kind: str, seed: int, name: str | None = None, **more: Any) -> nn.Module:
    """Of distinct sizes, in float64, random gains and biases."""
    cls = getattr(transformers, name or KINDS[kind])
    module = cls(cls.config_class(**CONFIGS[kind] | more)).double().eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in module.named_parameters():
            norm = ("norm" in key.lower() or "ln_" in key) and key.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64) * 0.3 + norm)
    return module


def batch(kind: str, seed: int = 0, padded: bool = True) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    if kind == "vit":
        return {"pixel_values": torch.randn(6, 3, 12, 20, generator=rng, dtype=torch.float64)}
    mask = torch.ones(6, 11, dtype=torch.long)
    if padded:
        mask[1, 7:] = 0
        mask[2, :3] = 0
    return {"input_ids": torch.randint(61, (6, 11), generator=rng), "attention_mask": mask}


@torch.no_grad()
def logits(module: nn.Module, state: spaces.State, kind: str) -> Tensor:
    """Of the module with these weights, where something is to be seen; the module's own are restored."""
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    inputs = batch(kind)
    module.load_state_dict(dict(state))
    found: Tensor = module(**inputs).logits
    module.load_state_dict(own)
    return found if kind == "vit" else found[inputs["attention_mask"].bool()]


def random_permutations(state: spaces.State, kind: str, seed: int = 0) -> dict[str, Tensor]:
    """By space; heads whole."""
    rng = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for place in spaces.places(state, kind):
        n = len(place.units(state))
        if place.space in found:
            continue
        if place.space.endswith((".qk", ".v")):
            order = list(range(HEADS))
            random.Random(place.space.partition(".")[0]).shuffle(order)  # the same of both
            inside = [torch.randperm(n // HEADS, generator=rng) + n // HEADS * head for head in order]
            found[place.space] = torch.cat(inside)
        else:
            found[place.space] = torch.randperm(n, generator=rng)
    return found
