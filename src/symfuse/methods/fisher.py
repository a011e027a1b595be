"""The mean of models, each entry weighted by how strongly its model's likelihood depends on it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from symfuse.device import CPU
from symfuse.errors import OptionError
from symfuse.evaluation import Batch
from symfuse.evaluation.tasks.base import IGNORED, NOT_INPUTS, Predicting
from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.data import Inputs, Learned, examples_of, running, statistics_of
from symfuse.methods.linear import linear
from symfuse.methods.parts.mean import normalized
from symfuse.methods.parts.task_vectors import where_equal
from symfuse.methods.registry import method
from symfuse.model import Model
from symfuse.modules import canonical_names
from symfuse.stats.fisher import fisher_diagonal
from symfuse.stats.statistics import Statistics

LABELS = ("sampled", "given")
SCALES = ("none", "mean", "norm")
FEW = 32  # examples; with fewer, most entries depend on the content of a handful of texts


def learn(inputs: Inputs, *, labels: str = "sampled") -> Learned:
    """labels: "sampled" from the model's own predictions (the Fisher information; the data need no labels), or "given"
    with the data (the empirical one)."""
    require_labels(labels)
    collect = partial(fisher_of, labels=labels, seed=inputs.seed)
    statistics = statistics_of(inputs, "Fisher information", inputs.predicting, collect)
    notes = list[str]()
    if few := [f"{s.count} of {s.name}" for s in statistics if s.count < FEW]:
        notes.append(f"the Fisher information is from few examples ({', '.join(few)}); use more data")
    kinds = [s.provenance.get("labels") for s in statistics]  # saved ones have their own
    if len(set(kinds)) > 1:
        notes.append(
            f"the Fisher information of some models uses sampled labels, that of others the labels of the data: {kinds}"
        )
    record = {"labels": kinds, "examples": {m.name: s.count for m, s in zip(inputs.models, statistics, strict=True)}}
    return Learned(
        statistics=tuple(statistics), record=record, summary=examples_of(inputs, statistics), notes=tuple(notes)
    )


def require_labels(labels: str) -> None:
    """OptionError for unknown labels."""
    if labels not in LABELS:
        raise OptionError(f"labels is {labels!r:.40}; expected {' or '.join(LABELS)}")


@method(
    "fisher",
    label="Fisher",
    paper="Matena and Raffel 2022, Merging models with Fisher-weighted averaging, arXiv 2111.09832",
    learn=learn,
    statistics="fisher",
    unlabelled=lambda parameters: parameters.get("labels") != "given",
)
def fisher(stream: Stream, *, weight: PerModel = (1.0,), floor: float = 1e-6, scale: str = "none") -> Iterator[Tensor]:
    """Σ wᵢ Fᵢ θᵢ / Σ wᵢ Fᵢ, entry by entry (Eq. 3), with Fᵢ at least `floor` times the mean of all entries of all
    models; an entry on which no model's likelihood depends is the weighted mean. scale: divide Fᵢ by nothing ("none"),
    by its mean, or by its Euclidean norm, so that no model outweighs the others. Tensors without statistics: the
    weighted mean. OptionError for negative weights or floors, and unknown scales."""
    if scale not in SCALES:
        raise OptionError(f"scale is {scale!r}; expected {', '.join(SCALES)}")
    if floor < 0 or min(weight) < 0:
        raise OptionError(f"weights {list(weight)} and floor {floor}: a weighted mean needs numbers of at least 0")
    shares = normalized(weight, "")
    if None in stream.statistics:
        yield from linear(stream, weight=weight)
        return
    known = [one for one in stream.statistics if one is not None]
    values = [one.values for one in known]
    sizes = [one.get(scale) or 1.0 for one in values]
    least = floor * math.fsum(one["mean"] / size for one, size in zip(values, sizes, strict=True)) / len(known)
    for block in stream:
        top, bottom, plain = (torch.zeros_like(block.tensors[0]) for _ in range(3))
        for tensor, share, one, size in zip(block.tensors, shares, known, sizes, strict=True):
            importance = one.part("fisher", block.first, block.first + tensor.numel()).to(tensor).reshape(tensor.shape)
            importance = importance.div(size).clamp_(min=least).mul_(share)
            top.addcmul_(importance, tensor)
            bottom.add_(importance)
            plain.add_(tensor, alpha=share)
        yield where_equal(block.tensors, torch.where(bottom > 0, top / bottom, plain))


def fisher_of(
    model: Model,
    task: Predicting,
    *,
    labels: str = "sampled",
    seed: int = 0,
    scratch: Path | None = None,
    device: str = CPU,
) -> Statistics:
    """The diagonal of the Fisher information of a model: the mean over examples of (∂ log p(y|x) / ∂θ)².

    In float32. Memory: the model twice, and what training on one batch needs; while two examples are compared (see
    `fisher_diagonal`) the model twice more. scratch: an empty folder to which the result is written, and from which it
    is read; by default it stays in memory. seed: of the sampled labels, which depend only on it and the example, not on
    batches and padding. device: where the model is run.
    """
    require_labels(labels)
    with running([model], task, device=device) as space:
        module = space.set([1.0])
        names = canonical_names(model, module)
        diagonal = fisher_diagonal(module, task.batches, log_likelihood(task, labels, seed), parameters=names)
    tensors = {names[name]: tensor for name, tensor in diagonal.tensors.items()}
    provenance = {
        "model": model.checkpoint.lineage(compute=True), "task": task.describe(), "labels": labels, "seed": seed,
        "notes": list(diagonal.notes),
    }  # fmt: skip
    name = f"the Fisher information of {model.name}"
    statistics = Statistics("fisher", tensors, diagonal.count, provenance, name=name)
    if scratch is None:
        return statistics
    statistics.write(scratch)
    return replace(Statistics.load(scratch), name=name)


def log_likelihood(task: Predicting, labels: str, seed: int) -> Callable[[nn.Module, Batch], Tensor]:
    """Σ −log p(y|x) over the examples of a batch, with its graph. Sampled labels are drawn without gradient, so that
    the gradient at one label is squared; the expected score over all labels is zero."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        if labels == "given":
            return task.totals(module, batch).loss
        logits, targets = task.predicted(module, batch)
        if targets.is_floating_point():
            raise OptionError(f"{task.source}: the model predicts a number; the Fisher information needs classes")
        drawn = sampled(logits.detach(), uniforms(batch, targets.shape, seed).to(logits))
        drawn = torch.where(targets == IGNORED, IGNORED, drawn)
        return nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), drawn.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    return loss


def sampled(logits: Tensor, uniform: Tensor) -> Tensor:
    """A class for each [...], by inverse transform sampling from softmax(logits [..., classes])."""
    steps = logits.double().softmax(-1).cumsum(-1)
    return (
        torch.searchsorted(steps, (uniform.double() * steps[..., -1]).unsqueeze(-1))
        .squeeze(-1)
        .clamp(max=logits.shape[-1] - 1)
    )


def uniforms(batch: Batch, shape: torch.Size, seed: int) -> Tensor:
    """Numbers in [0, 1) for the positions of each example, from the seed and the example's content without padding."""
    rows = []
    mask = batch.get("attention_mask")
    for i in range(shape[0]):
        digest = seed
        for name, field in sorted(batch.items()):
            row = field[i]
            if mask is not None and row.shape == mask[i].shape:
                row = row[mask[i].bool()]
            if name not in NOT_INPUTS:
                digest = zlib.crc32(row.contiguous().numpy().tobytes(), digest & 0xFFFFFFFF)
        rows.append(np.random.default_rng([digest, abs(seed)]).random(math.prod(shape[1:])))
    return torch.from_numpy(np.stack(rows)).reshape(shape)
