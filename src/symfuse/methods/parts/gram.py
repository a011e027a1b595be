"""Methods whose result is a linear combination of tensors, with coefficients that depend only on their inner products.

These are Slerp, NuSLERP, Multi-SLERP, the Karcher mean and Model Stock: one pass computes the k×k Gram matrix, a
function of that small matrix gives k coefficients, and a second pass adds up. They therefore do not depend on the basis
of the tensors: if all inputs are rotated in the same way, so is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from symfuse.merging.stream import Block, Stream

# Elements of each tensor that are widened to float64 at a time: they stay in the processor's cache.
CHUNK = 2**16
# Two directions are one line where 1 - cos² is below this; unit vectors cancel where their sum is below its root.
PARALLEL = 1e-12

# The k vectors of a block, as matrices (rows, columns).
Vectors = Callable[[Block], list[Tensor]]


def models(block: Block) -> list[Tensor]:
    """The models' tensors, without the base."""
    return list(block.tensors)


def base_and_models(block: Block) -> list[Tensor]:
    """The base's tensor, then the models'."""
    return [block.origin, *block.tensors]


def deltas(block: Block) -> list[Tensor]:
    """The models' tensors less the base's."""
    return block.deltas()


def centred(stream: Stream) -> Vectors:
    """Deltas, for a method whose base is optional, if there is one."""
    return models if stream.base is None else deltas


def gram(blocks: Iterable[Block], vectors: Vectors, *, rows: bool = False) -> Tensor:
    """Inner products of k vectors in float64, (k, k); with `rows` those of each row, (k, k, rows). One pass.

    Values are converted before they are multiplied, so that products of float32 values are exact, and the cosine of two
    vectors has an error of about 1e-14. In float32 it would be 1e-7, and angles below 5e-4 could not be distinguished
    from zero.
    """
    by_row: list[Tensor] = []
    total: Tensor | None = None
    for block in blocks:
        matrices = vectors(block)
        if rows:
            step, axis = max(1, CHUNK // max(1, matrices[0].shape[1])), 0
        else:  # one long row
            matrices, step, axis = [matrix.reshape(1, matrix.numel()) for matrix in matrices], CHUNK, 1
        for pieces in zip(*(torch.split(matrix, step, axis) for matrix in matrices), strict=True):
            wide = torch.stack([piece.double() for piece in pieces], 1)  # (rows, k, columns)
            product = wide @ wide.mT
            if rows:
                by_row.append(product)
            else:  # added immediately, since small results between large ones would fragment the memory
                total = product if total is None else total.add_(product)
    if total is not None:
        return total.squeeze(0).cpu()
    return torch.cat(by_row).permute(1, 2, 0).cpu()


def combine(blocks: Iterable[Block], vectors: Vectors, coefficients: Tensor) -> Iterator[Tensor]:
    """Σ cᵢ vᵢ, block by block, and the base added if the vᵢ are deltas. coefficients: (k,), or (k, rows)."""
    first = 0
    for block in blocks:
        parts = vectors(block)
        if coefficients.dim() == 1:
            shares = coefficients.tolist()
            out = parts[0].mul_(shares[0])
            for part, share in zip(parts[1:], shares[1:], strict=True):
                out.add_(part, alpha=share)
        else:
            last = first + len(parts[0])
            columns = coefficients[:, first:last, None].to(parts[0])
            out = parts[0].mul_(columns[0])
            for part, column in zip(parts[1:], columns[1:], strict=True):
                out.addcmul_(part, column)
            first = last
        yield out.add_(block.origin) if vectors is deltas else out


def norms(products: Tensor) -> Tensor:
    """Lengths, (k, …), from a Gram matrix."""
    return products.diagonal(dim1=0, dim2=1).movedim(-1, 0).clamp(min=0).sqrt()


def inverse(lengths: Tensor) -> Tensor:
    """1 / length, and 0 for the zero vector, which has no direction."""
    return torch.where(lengths > 0, 1 / lengths, 0)


def cosines(products: Tensor) -> Tensor:
    """Gram matrix of the unit vectors, in [-1, 1]; rows and columns of zero vectors are zero."""
    scale = inverse(norms(products))
    return (products * scale[:, None] * scale[None]).clamp(-1, 1)


def arc(products: Tensor, t: float, threshold: float) -> Tensor:
    """Coefficients (2, …) of the point at t between two vectors, from their Gram matrix (2, 2, …).

    On the great circle: sin((1-t)θ)/sin θ and sin(tθ)/sin θ (Shoemake 1985, Animating rotation with quaternion curves);
    1-t and t if the circle is undetermined or nearly straight: |cos θ| > threshold, or a vector is zero.
    """
    cosine = cosines(products)[0, 1]
    straight = (cosine.abs() > threshold) | (norms(products) == 0).any(0)
    angle = torch.acos(torch.where(straight, 0, cosine))
    weights = torch.stack([torch.sin((1 - t) * angle), torch.sin(t * angle)]) / torch.sin(angle)
    line = torch.tensor([1 - t, t], dtype=weights.dtype).reshape(2, *[1] * cosine.dim())
    return torch.where(straight, line, weights)
