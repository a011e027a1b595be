"""Take from another model the entries whose importance exceeds a threshold that depends on the tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from symfuse.merging.stream import Block, Stream
from symfuse.methods.parts.sparsify import kth_largest
from symfuse.methods.registry import method


@method(
    "arcee_fusion",
    label="Arcee Fusion",
    paper="Arcee 2025, arcee_fusion in mergekit, github.com/arcee-ai/mergekit",
    base="required",
    models=(1, 1),
)
def arcee_fusion(stream: Stream) -> Iterator[Tensor]:
    """The other model's entry where its importance reaches median + 1.5 (Q3 - Q1) of the tensor, the base's elsewhere.

    Importance: |other - base| times the Kullback-Leibler divergence of the softmax of the row (the last dimension) in
    the other model from that in the base, each with 1e-8 added. Quantile q of n values: the sorted value number
    ⌊q (n-1)⌋, of all values: mergekit draws a random million of them from larger tensors, so that two runs of it
    differ. Divergences are summed in float64 (between similar rows, float32 would hold noise only). If no row's
    distribution changes, all importances are zero, as is the threshold: the other model.
    """
    # In one piece: small ones, made between blocks and kept, would split the memory that blocks leave for the next.
    divergence = torch.empty(stream.rows, dtype=stream.dtype, device=stream.device)

    def rows(block: Block) -> Tensor:
        first = block.first // max(1, stream.columns)
        return divergence[first : first + len(block.origin)]

    for block in stream:
        rows(block).copy_(_divergence(block))

    def scored() -> Iterator[tuple[Block, Tensor]]:
        for block in stream:
            yield block, (block.tensors[0] - block.origin).abs_().mul_(rows(block)[:, None])

    limit = 0.0
    if size := stream.rows * stream.columns:
        ranks = [quarter * (size - 1) // 4 for quarter in (1, 2, 3)]
        from_top = [size - rank for rank in ranks]
        (cuts,) = kth_largest(lambda: ([score] for _, score in scored()), [from_top], stream.dtype)
        low, median, high = (cut.value for cut in cuts)
        limit = median + 1.5 * (high - low)
    for block, score in scored():
        yield torch.where(score >= limit, block.tensors[0], block.origin)


def _divergence(block: Block) -> Tensor:
    """KL divergence of each row, (rows,), float64, never below zero."""
    after, before = (rows.double().softmax(1).add_(1e-8) for rows in (block.tensors[0], block.origin))
    return (after * (after / before).log_()).sum(1).clamp_(min=0)
