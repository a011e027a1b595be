"""Spherical interpolation of two models by weight, of tensors or of their rows or columns, about a base perhaps."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from symfuse.merging.base import PerModel
from symfuse.merging.stream import Block, Stream
from symfuse.methods.parts.gram import PARALLEL, arc, centred, combine, gram
from symfuse.methods.registry import method


@method(
    "nuslerp",
    label="NuSLERP",
    paper="Shoemake 1985, Animating rotation with quaternion curves, doi:10.1145/325165.325242",
    base="optional",
    models=(2, 2),
)
def nuslerp(
    stream: Stream, *, weight: PerModel, nuslerp_row_wise: bool = False, nuslerp_flatten: bool = True
) -> Iterator[Tensor]:
    """Slerp of two models at t = w₂ / (w₁ + w₂), or of their deltas if there is a base, which is then added.

    nuslerp_flatten: each tensor is one long vector. Otherwise each row (along the last dimension) is a vector of its
    own, or, with nuslerp_row_wise, each column (along the first dimension). Weights that sum to zero: t = 0.5.
    On the straight line where the two are parallel, opposite (1 - cos² below 1e-12) or one is zero.
    """
    total = sum(weight)
    t = 0.5 if abs(total) < 1e-6 else weight[1] / total
    threshold = (1 - PARALLEL) ** 0.5
    vectors = centred(stream)
    if nuslerp_flatten:
        yield from combine(stream, vectors, arc(gram(stream, vectors), t, threshold))
    elif not nuslerp_row_wise or len(stream.shape) < 2:
        yield from combine(stream, vectors, arc(gram(stream, vectors, rows=True), t, threshold))
    else:
        turned = [_turned(stream.whole())]
        coefficients = arc(gram(turned, vectors, rows=True), t, threshold)
        for out in combine(turned, vectors, coefficients):
            yield out.T.reshape(stream.rows, stream.columns)


def _turned(block: Block) -> Block:
    """Vectors along the first dimension as rows."""
    tensors = tuple(tensor.flatten(1).T for tensor in block.tensors)
    return Block(0, tensors, None if block.base is None else block.base.flatten(1).T)
