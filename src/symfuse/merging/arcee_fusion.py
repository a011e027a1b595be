"""Takes from another model the entries that matter more than usual, by a threshold that each tensor sets itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from symfuse.merging.base import method
from symfuse.merging.stream import Block, Stream

# Bits of a number that one pass of the selection settles.
DIGIT = 16


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
    divergence = torch.cat([_divergence(block) for block in stream]).to(stream.dtype)

    def scored() -> Iterator[tuple[Block, Tensor]]:
        first = 0
        for block in stream:
            last = first + len(block.origin)
            yield block, (block.tensors[0] - block.origin).abs_().mul_(divergence[first:last, None])
            first = last

    limit = 0.0
    if size := stream.rows * stream.columns:
        ranks = [quarter * (size - 1) // 4 for quarter in (1, 2, 3)]
        low, median, high = order_statistics(lambda: (score for _, score in scored()), ranks, stream.dtype)
        limit = median + 1.5 * (high - low)
    for block, score in scored():
        yield torch.where(score >= limit, block.tensors[0], block.origin)


def _divergence(block: Block) -> Tensor:
    """KL divergence of each row, (rows,), float64, never below zero."""
    after, before = (rows.double().softmax(1).add_(1e-8) for rows in (block.tensors[0], block.origin))
    return (after * (after / before).log_()).sum(1).clamp_(min=0)


def order_statistics(parts: Callable[[], Iterable[Tensor]], ranks: Sequence[int], dtype: torch.dtype) -> list[float]:
    """The values that stand at these places (from 0) among all, in ascending order; without sorting them.

    parts: gives all values, of `dtype` (float32 or float64), none negative, in pieces, each time it is called. The bits
    of such numbers are ordered as the numbers are. So each pass counts how often each next 16 bits follow those known
    so far, which needs two passes over float32 (four over float64) and the memory of a few counts.
    """
    integer = torch.int64 if dtype.itemsize == 8 else torch.int32
    known, left = [0] * len(ranks), list(ranks)
    top = dtype.itemsize * 8 - DIGIT
    for shift in range(top, -1, -DIGIT):
        counts = {head: torch.zeros(2**DIGIT, dtype=torch.int64) for head in known}
        for part in parts():
            bits = part.reshape(-1).view(integer) >> shift
            for head, count in counts.items():
                among = bits if shift == top else bits[bits >> DIGIT == head]
                count += torch.bincount(among & (2**DIGIT - 1), minlength=2**DIGIT)
        for i, head in enumerate(known):
            upto = counts[head].cumsum(0)
            digit = int(torch.searchsorted(upto, left[i], right=True))
            left[i] -= int(upto[digit - 1]) if digit else 0
            known[i] = head << DIGIT | digit
    return [float(value) for value in torch.tensor(known, dtype=integer).view(dtype)]
