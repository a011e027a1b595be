"""The SCEPTR checkpoints as models to learn between: masked receptors as a task of symfuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from symfuse.demo import receptors
from symfuse.evaluation import Batch
from symfuse.evaluation.tasks.base import Predicting
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint

LEARNED, AT_ONCE, MASKS = 1000, 16, 10  # receptors to learn on, of a batch, and how often each is masked anew


class Receptors(Predicting):
    """The hidden amino acids of receptors, tokens [N, L, 4]."""

    name = "masked-receptors"
    auto = "none of transformers"

    def predicted(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        predict: Any = module.get_mlm_token_predictions_for
        return predict(batch["tokens"]), batch["labels"]


def checkpoint(name: str) -> Checkpoint:
    return open_checkpoint(receptors.convert(name))


def task(config: Any, split: str) -> Receptors:
    """train: 1,000 of the receptors "match", many times; match: the other 200; test: all others."""
    if split == "test":
        return Receptors([_masked(receptors.tokens(config, "test"), 0)], "receptors, test")
    tokens = receptors.tokens(config, "match")
    if split == "match":
        return Receptors([_masked(tokens[LEARNED:], 0)], "receptors, match")
    batches = []
    for seed in range(1, MASKS + 1):
        order = torch.randperm(LEARNED, generator=torch.Generator().manual_seed(seed))
        whole = _masked(tokens[:LEARNED], seed)
        batches += [{key: t[part] for key, t in whole.items()} for part in torch.split(order, AT_ONCE)]
    return Receptors(batches, "receptors, train")


def _masked(tokens: Tensor, seed: int) -> dict[str, Tensor]:
    masked, labels = receptors.mask(tokens, seed=seed)
    return {"tokens": masked, "labels": labels}
