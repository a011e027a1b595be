"""Isotropic merging: every direction of the merged update gets the same strength."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.stream import Stream
from symfuse.methods.registry import method
from symfuse.methods.tsv import of_matrices, polar, singular

PAPER = "Marczak et al. 2025, No Task Left Behind: Isotropic Model Merging, arXiv 2502.04959"


@method("iso_c", label="Iso-C", paper=PAPER, base="required")
def iso_c(stream: Stream, *, lambda_: float = 1.0) -> Iterator[Tensor]:
    """base + lambda σ̄ U Vᵀ, for a matrix: U S Vᵀ is the sum of the deltas, σ̄ the mean of its singular values.

    Singular values that are rounding errors count as zero and are not in the mean, since their vectors are arbitrary; a
    sum of zero gives the base. Tensors of three dimensions are stacks of matrices; all others get
    base + lambda · mean of the deltas.
    """
    yield from of_matrices(stream, lambda_, common)


@method("iso_cts", label="Iso-CTS", paper=PAPER, base="required")
def iso_cts(stream: Stream, *, lambda_: float = 1.0, common_fraction: float = 0.8) -> Iterator[Tensor]:
    """As iso_c, but of the r = min(shape) directions only a share `common_fraction` are those of the sum of the deltas.
    The rest is divided evenly among the tasks: each gets the first singular vectors of its delta minus its projection
    on the common left vectors. All directions are made perpendicular (orthogonal Procrustes) and get the mean of their
    singular values. OptionError if common_fraction is not in [0, 1].
    """
    if not 0 <= common_fraction <= 1:
        raise OptionError(f"common_fraction is {common_fraction}, expected a number from 0 to 1")
    yield from of_matrices(stream, lambda_, lambda tasks: common_and_specific(tasks, common_fraction))


def common(tasks: Sequence[Tensor]) -> Tensor:
    """The merged delta of deltas of one shape (…, m, n): Iso-C."""
    left, values, right = singular(sum(tasks[1:], tasks[0]))
    return _mean(values) * (left @ right.mT)


def common_and_specific(tasks: Sequence[Tensor], fraction: float) -> Tensor:
    """The merged delta of deltas of one shape (…, m, n): Iso-CTS."""
    rank = min(tasks[0].shape[-2:])
    each = min(round((rank - int(rank * fraction)) / len(tasks)), rank // len(tasks))
    shared = [part[..., : rank - each * len(tasks)] for part in singular(sum(tasks[1:], tasks[0]))]
    parts = [shared]
    for task in tasks:
        rest = task - shared[0] @ (shared[0].mT @ task)
        parts.append([part[..., :each] for part in singular(rest, torch.linalg.matrix_norm(task))])
    left, values, right = (torch.cat(of_all, -1) for of_all in zip(*parts, strict=True))
    return _mean(values) * (polar(left) @ polar(right).mT)


def _mean(values: Tensor) -> Tensor:
    """Of the singular values that are not zero, (…, 1, 1)."""
    return (values.sum(-1) / (values > 0).sum(-1).clamp(min=1))[..., None, None]
