"""Task singular vectors: the leading directions of each task, made perpendicular to those of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from symfuse.merging.stream import Stream
from symfuse.methods.registry import method


@method(
    "tsv",
    label="Task singular vectors",
    paper="Gargiulo et al. 2025, Task Singular Vectors, arXiv 2412.00081 (TSV-Merge)",
    base="required",
)
def tsv(stream: Stream, *, lambda_: float = 1.0) -> Iterator[Tensor]:
    """base + lambda U⊥ S V⊥ᵀ, for a matrix and k models. One model: itself, if lambda is 1.

    Of the r = min(shape) singular vectors of each delta the first r/k are used (rounded down, at least one); those of
    all tasks are concatenated in U and V, their singular values in S; ⊥ is the nearest matrix with perpendicular
    columns (orthogonal Procrustes). Singular values that are rounding errors count as zero, and directions that are
    not there are left out, so zero and equal deltas have one result: that of the others, that of one.
    Tensors of three dimensions are stacks of matrices; all others get base + lambda · mean of the deltas.
    """
    yield from of_matrices(stream, lambda_, task_vectors)


def task_vectors(tasks: Sequence[Tensor]) -> Tensor:
    """The merged delta of deltas of one shape (…, m, n)."""
    kept = max(1, min(tasks[0].shape[-2:]) // len(tasks))
    parts = [[part[..., :kept] for part in singular(task)] for task in tasks]
    left, values, right = (torch.cat(of_all, -1) for of_all in zip(*parts, strict=True))
    return (polar(left) * values[..., None, :]) @ polar(right).mT


def of_matrices(stream: Stream, scale: float, merge: Callable[[Sequence[Tensor]], Tensor]) -> Iterator[Tensor]:
    """base + scale · merge(deltas) of whole matrices or stacks of matrices; the mean of the deltas for other tensors.

    Matrices are merged in float64, whatever the working dtype: in float32 singular vectors differ by up to 1e-4 if the
    solver runs on another number of threads, and take nearly as long.
    """
    if len(stream.shape) not in (2, 3) or 0 in stream.shape:
        for block in stream:
            tasks = block.deltas()
            yield torch.add(block.origin, sum(tasks[1:], tasks[0]), alpha=scale / len(tasks))
        return
    block = stream.whole()
    merged = block.origin + scale * merge([delta.double() for delta in block.deltas()])
    yield merged.to(stream.dtype).reshape(stream.rows, stream.columns)


def singular(matrix: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """U (…, m, r), S (…, r) and V (…, n, r); singular values at the level of rounding, and their vectors, are zero:
    those that a solver returns are arbitrary. scale (…): the norm of the matrices from which this one was computed, by
    default its own largest singular value."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    largest = values[..., 0] if scale is None else scale
    floor = largest[..., None] * max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps
    there = values > floor
    return left * there[..., None, :], values * there, right.mT * there[..., None, :]


def polar(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns, or rows if it is wide; a partial isometry if ranks are missing."""
    left, _, right = singular(matrix)
    return left @ right.mT
