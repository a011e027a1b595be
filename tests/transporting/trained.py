"""Models on which real adapters of peft were trained (by random numbers), and the outputs that they have with them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from contract.tiny import DECODER, DINOV2, GPT2, TEXT, randomise
from symfuse.alignment import Alignment, random_alignment
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.rewriting import canonical

FOLDED = ("untie", "fold_norms", "centre", "drop_gauges")
SCALED = ("fold_scales", *FOLDED)
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", TEXT),
    "bert-mlm": ("BertForMaskedLM", "BertConfig", TEXT),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"tie_word_embeddings": False}),
    "llama-bias": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"attention_bias": True, "tie_word_embeddings": False}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {"image_size": 12, "patch_size": 4, "hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4,
         "intermediate_size": 29, "num_labels": 3},
    ),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", DINOV2),
}  # fmt: skip


def base_folder(kind: str, folder: Path, seed: int = 0) -> Path:
    class_name, config_name, settings = CLASSES[kind]
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**settings))
    randomise(model, seed).save_pretrained(folder)
    return folder


def load(kind: str, folder: Path) -> Any:
    with warnings.catch_warnings(action="ignore"):
        loaded, info = getattr(transformers, CLASSES[kind][0]).from_pretrained(
            folder, dtype=torch.float64, output_loading_info=True
        )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded.eval()


@torch.no_grad()
def outputs(kind: str, model: Any) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    if kind in ("vit", "dinov2"):
        side = CLASSES[kind][2]["image_size"]
        return model(pixel_values=torch.randn(2, 3, side, side, dtype=torch.float64, generator=rng)).logits
    return model(input_ids=torch.randint(3, 61, (2, 11), generator=rng)).logits


def train(kind: str, options: dict[str, Any], base: Path, folder: Path, seed: int = 2) -> Tensor:
    """Save an adapter with random numbers in all that training changes; return the outputs with it, in float64."""
    import peft

    rng = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):
        model = peft.get_peft_model(load(kind, base), peft.LoraConfig(**options)).double()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.requires_grad:
                    about = 1.0 if p.ndim == 1 and name.endswith("weight") else 0.0
                    p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64) / 4 + about)
        model.save_pretrained(folder)
    return outputs(kind, model.eval())


def with_adapter(kind: str, base: Path, folder: Path) -> Tensor:
    import peft

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(load(kind, base), folder)
    assert not [w for w in told if "missing" in str(w.message).lower()], [str(w.message) for w in told]
    return outputs(kind, model.double().eval())


def moved(base: Path, folder: Path, frame: tuple[str, ...] = (), seed: int = 3, **options: Any) -> Alignment:
    """Random elements of all that may act in that frame, and the moved base, written; for gauges see test_gauged.py."""
    model = canonical(Model.of(open_checkpoint(base)), frame)
    random = random_alignment(model.spec, seed, **options)
    alignment = replace(random, frame=frame, gauges={})
    alignment(base).save(folder, extra={"alignment.symfuse": alignment.to_bytes()})
    return alignment
