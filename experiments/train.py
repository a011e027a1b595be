"""Small models of one shape from different seeds, which were trained independently: python experiments/train.py

A ViT on handwritten digits and one on clothes, a GPT-2, a Llama and a BERT (masked LM) on the characters of
Shakespeare's plays, and a ViT and a GPT-2 of half the width; one to four minutes each on a core. They are kept as
`transformers` folders in the cache folder of `symfuse.demo.packages`, and trained again only if RECIPE is raised. The
seed decides the initial weights and the order of the data.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpora
import torch
from torch import Tensor, nn

from symfuse.demo.packages import cache, publishing
from symfuse.evaluate import Task
from symfuse.evaluate.tasks.causal_lm import CausalLM
from symfuse.evaluate.tasks.image_classification import ImageClassification
from symfuse.evaluate.tasks.masked_lm import MaskedLM

RECIPE = 1
LENGTH = 64  # characters in a window of the GPT-2
SHORT = 16  # of the BERT: with 64 it does not find out within minutes that the neighbours of a letter tell it
CHARACTERS = 2048  # in a batch
WARM_UP = 50

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """build: a new model. draw: one batch of training data. tasks: the Task of a part of the data, for symfuse."""

    build: Callable[[], Any]
    draw: Callable[[torch.Generator], Inputs]
    task: Callable[[corpora.Split], Task]
    steps: int
    rate: float


def train(name: str, seed: int) -> Path:
    """The folder of a trained model; it is trained if it is not there yet."""
    folder = cache() / f"trained-{RECIPE}" / f"{name}-{seed}"
    if folder.is_dir():
        return folder
    kind, start = KINDS[name], time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.build()
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=kind.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, kind.steps))
    model.train()
    for step in range(kind.steps):
        loss = model(**kind.draw(rng)).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{name}-{seed} step {step}: {loss.item():.3f}", flush=True)
    score = kind.task("match")(model.eval())
    print(f"{name}-{seed}: {score.loss:.3f} {dict(score.metrics)} in {time.perf_counter() - start:.0f} s", flush=True)
    with publishing(folder) as scratch:
        model.save_pretrained(scratch)
    return folder


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to nothing."""
    return min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


def _vit(width: int = 64, image: int = 8, patch: int = 2) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width, num_hidden_layers=4, num_attention_heads=width // 16, intermediate_size=2 * width,
        image_size=image, patch_size=patch, num_channels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 10
    return ViTForImageClassification(config)


def _draw_digits(rng: torch.Generator) -> Inputs:
    images, labels = corpora.digits("train")
    chosen = torch.randint(len(labels), (64,), generator=rng)
    return {"pixel_values": images[chosen], "labels": labels[chosen]}


def _task_digits(split: corpora.Split) -> Task:
    images, labels = corpora.digits(split)
    return ImageClassification([{"pixel_values": images, "labels": labels}], f"digits, {split}")


def _draw_fashion(rng: torch.Generator) -> Inputs:
    images, labels = corpora.fashion("train")
    chosen = torch.randint(len(labels), (64,), generator=rng)
    return {"pixel_values": images[chosen], "labels": labels[chosen]}


def _task_fashion(split: corpora.Split) -> Task:
    images, labels = (torch.split(part, 500) for part in corpora.fashion(split))
    batches = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    return ImageClassification(batches, f"Fashion-MNIST, {split}")


def _gpt2(width: int = 64) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(corpora.ALPHABET), n_positions=LENGTH, n_embd=width, n_layer=3, n_head=width // 16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(corpora.ALPHABET), max_position_embeddings=LENGTH, hidden_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=160, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _draw_windows(rng: torch.Generator, length: int) -> Tensor:
    found = corpora.text("train")
    starts = torch.randint(len(found) - length, (CHARACTERS // length,), generator=rng)
    return found[starts[:, None] + torch.arange(length)]


def _draw_next(rng: torch.Generator) -> Inputs:
    tokens = _draw_windows(rng, LENGTH)
    return {"input_ids": tokens, "labels": tokens}


def _task_next(split: corpora.Split) -> Task:
    tokens = corpora.windows(split, 128, LENGTH)
    batches = [{"input_ids": t, "attention_mask": torch.ones_like(t), "labels": t} for t in torch.split(tokens, 64)]
    return CausalLM(batches, f"Shakespeare, {split}")


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=len(corpora.ALPHABET) + 1, max_position_embeddings=SHORT, hidden_size=64, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _draw_masked(rng: torch.Generator) -> Inputs:
    tokens, labels = corpora.mask(_draw_windows(rng, SHORT), rng)
    return {"input_ids": tokens, "labels": labels}


def _task_masked(split: corpora.Split) -> Task:
    rng = torch.Generator().manual_seed(0)
    masked = [corpora.mask(t, rng) for t in torch.split(corpora.windows(split, 1024, SHORT), 256)]
    batches = [{"input_ids": t, "attention_mask": torch.ones_like(t), "labels": labels} for t, labels in masked]
    return MaskedLM(batches, f"Shakespeare, {split}")


KINDS = {
    "vit": Kind(_vit, _draw_digits, _task_digits, steps=1000, rate=1e-3),
    "gpt2": Kind(_gpt2, _draw_next, _task_next, steps=1500, rate=2e-3),
    "llama": Kind(_llama, _draw_next, _task_next, steps=1500, rate=2e-3),
    "bert": Kind(_bert, _draw_masked, _task_masked, steps=1500, rate=2e-3),
    "fashion": Kind(lambda: _vit(image=28, patch=7), _draw_fashion, _task_fashion, steps=2500, rate=1e-3),
    "vit-half": Kind(lambda: _vit(32), _draw_digits, _task_digits, steps=1000, rate=1e-3),
    "gpt2-half": Kind(lambda: _gpt2(32), _draw_next, _task_next, steps=1500, rate=2e-3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", default=[], help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    for name in options.kinds or KINDS:
        for seed in options.seeds:
            print(train(name, seed))


if __name__ == "__main__":
    main()
