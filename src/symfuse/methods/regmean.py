"""RegMean: the linear map that best reproduces each model's own outputs on that model's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from symfuse.device import CPU
from symfuse.errors import IncompatibleError, OptionError
from symfuse.evaluation import Task
from symfuse.evaluation.tasks.base import readable
from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.data import Inputs, Learned, examples_of, running, statistics_of
from symfuse.methods.linear import linear
from symfuse.methods.parts.mean import normalized
from symfuse.methods.registry import method
from symfuse.model import Model
from symfuse.stats.gram import gram_matrices
from symfuse.stats.statistics import Statistics

# Rounding errors, in units of the last digit and inputs, that a pivot of the factorisation must exceed.
SLACK = 10


def learn(inputs: Inputs) -> Learned:
    """The Gram matrices of the inputs of each model's linear maps on its data, without labels. They are stored in a
    temporary folder, and are in memory for one model, or one group of its layers, at a time."""
    statistics = statistics_of(inputs, "Gram matrices", inputs.task, partial(gram_of, memory=inputs.memory))
    record = {"examples": {m.name: s.count for m, s in zip(inputs.models, statistics, strict=True)}}
    notes = tuple(note for s in statistics for note in s.notes())
    return Learned(statistics=tuple(statistics), record=record, summary=examples_of(inputs, statistics), notes=notes)


@method(
    "regmean",
    label="RegMean",
    paper="Jin et al. 2023, Dataless Knowledge Fusion by Merging Weights of Language Models, arXiv 2212.09849 (Eq. 2)",
    learn=learn,
    statistics="gram",
    unlabelled=lambda _parameters: True,
)
def merge(
    stream: Stream, *, weight: PerModel = (1.0,), alpha: float = 0.9, ridge: float = 1e-6, per_token: bool = True
) -> Iterator[Tensor]:
    """`regmean` of the matrices of linear maps; `linear` of all other tensors, and of those without a Gram matrix.

    The stream's statistics are of `symfuse.stats.statistics`: read("gram"), Σ x xᵀ, and its values `dim` and
    `positions`. per_token: divide Gram matrices by their number of positions, so that more data do not weigh more; else
    all positions of all models weigh the same. OptionError for weights below zero, alpha outside of [0, 1], and Gram
    matrices that are singular without a ridge; IncompatibleError for those of another model.
    """
    _require(weight, alpha, ridge)
    statistics = [one for one in stream.statistics if one is not None]
    if len(statistics) < stream.count or len(stream.shape) != 2 or 0 in stream.shape:
        yield from linear(stream, weight=weight)
        return
    grams = [one.read("gram").to(stream.device, torch.float64) for one in statistics]
    dim, *others = {int(one.values["dim"]) for one in statistics}
    if wrong := [gram.shape for gram in grams if others or tuple(gram.shape) != (stream.shape[dim],) * 2]:
        raise IncompatibleError(
            f"{stream.name} is {list(stream.shape)}, and a Gram matrix of its inputs {list(wrong[0])}: these are "
            "statistics of another model; collect them again"
        )
    if per_token:
        grams = [gram / one.values["positions"] for gram, one in zip(grams, statistics, strict=True)]
    merged = regmean(stream.whole().tensors, grams, dim=dim, shares=weight, alpha=alpha, ridge=ridge, name=stream.name)
    yield merged.to(stream.dtype).reshape(stream.rows, stream.columns)


def regmean(
    weights: Sequence[Tensor],
    grams: Sequence[Tensor],
    *,
    dim: int,
    shares: Sequence[float],
    alpha: float = 0.9,
    ridge: float = 1e-6,
    name: str = "this weight",
) -> Tensor:
    """W = (Σ cᵢ G̃ᵢ)⁻¹ Σ cᵢ G̃ᵢ Wᵢ, with G̃ = α G + (1 - α) diag(G) + λ 1; float64.

    It minimises Σ cᵢ |Xᵢ (W - Wᵢ)|² for α = 1, λ = 0 and Gᵢ = Xᵢᵀ Xᵢ. weights: [m, n] or [n, m], dim the one of the n
    inputs; grams: [n, n]; shares: cᵢ, divided by their sum. λ is `ridge` times the mean of the diagonal of Σ cᵢ Gᵢ, the
    same for all models: it pulls towards the weighted average, which is the result for inputs that never occur.

    Solved for the difference from that average, for which λ cancels on the right-hand side, so that weights equal in
    all models are kept exactly. name: for messages. OptionError if the sum is singular and there is no ridge.
    """
    _require(shares, alpha, ridge)
    share = normalized(shares, "")
    first = weights[0].double()
    deltas = [(w.double() - first).movedim(dim, 0) for w in weights]
    mean = sum((c * d for c, d in zip(share[1:], deltas[1:], strict=True)), torch.zeros_like(deltas[0]))
    left, right = torch.zeros_like(grams[0], dtype=torch.float64), torch.zeros_like(mean)
    for c, gram, delta in zip(share, grams, deltas, strict=True):
        shrunk = c * alpha * gram.double()
        shrunk.diagonal().copy_(c * gram.diagonal())
        left += shrunk
        right += shrunk @ (delta - mean)
    size = left.diagonal().mean()
    if ridge and size > 0:
        left.diagonal().add_(ridge * size)
    solution = mean + _solve(left, right, name) if right.any() else mean
    return first + solution.movedim(0, dim)


def _solve(left: Tensor, right: Tensor, name: str) -> Tensor:
    """left⁻¹ right by Cholesky; OptionError if left is singular up to rounding, for any scale of the inputs."""
    factor, info = torch.linalg.cholesky_ex(left)
    floor = SLACK * len(left) * torch.finfo(left.dtype).eps
    if int(info) or bool((factor.diagonal().square() <= floor * left.diagonal()).any()):
        raise OptionError(
            f"{name}: the sum of the Gram matrices of its inputs is singular, since some inputs never occur or there "
            "are fewer positions than inputs: set a larger ridge (default 1e-6), a smaller alpha, or use more data"
        )
    return torch.cholesky_solve(right, factor)


def _require(shares: Sequence[float], alpha: float, ridge: float) -> None:
    if min(shares) < 0:
        raise OptionError(
            f"weights {list(shares)}: RegMean needs weights of at least 0; use linear, or leave models out"
        )
    normalized(shares, "")
    if not 0 <= alpha <= 1 or ridge < 0:
        raise OptionError(f"alpha is {alpha} and ridge {ridge}; expected alpha from 0 to 1, and ridge at least 0")


def gram_of(
    model: Model, task: Task, *, memory: int | None = None, scratch: Path | None = None, device: str = CPU
) -> Statistics:
    """Gram matrices of the inputs of a model's declared linear maps on data, in float32; see `gram_matrices`. device:
    where the model is run."""
    with running([model], task, device=device) as space:
        module = space.set([1.0])
        names = [name for name in model.spec.tensors if name not in model.spec.tied]
        with readable(module):
            statistics = gram_matrices(module, task.batches, names, memory=memory, scratch=scratch)
    provenance = {"model": model.checkpoint.lineage(compute=True), "task": task.describe()}
    return replace(statistics, provenance=provenance, name=f"the Gram matrices of {model.name}")
