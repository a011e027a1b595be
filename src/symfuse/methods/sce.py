"""Task vectors selected where the models differ most, weighted by their energy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.stream import Block, Stream
from symfuse.methods.parts.sparsify import Cut, Largest, kth_largest, repeatable
from symfuse.methods.parts.task_vectors import agreed, majority, where_equal
from symfuse.methods.registry import method


@method("sce", label="SCE", paper="Wan et al. 2024, FuseChat, arXiv 2408.07990", base="required")
def sce(
    stream: Stream,
    *,
    int8_mask: bool = False,  # noqa: ARG001
    select_topk: float = 1.0,
) -> Iterator[Tensor]:
    """Select, calculate, erase. Select: task vectors are kept at the int(select_topk·m) entries with the largest
    variance between models (the first of equal ones), where m is the number of entries with a variance above zero; all
    entries if select_topk is 1. Calculate: the weight of a model is the mean square of the rest of its vector over the
    whole tensor; weights sum to one. Erase: at each entry only values with the sign of the unweighted sum are averaged.
    OptionError if select_topk is not between 0 and 1."""
    if not 0 <= select_topk <= 1:
        raise OptionError(f"{stream.name}: select_topk is {select_topk}, expected 0 to 1")
    blocks = repeatable(stream)
    cut = _cut(blocks, select_topk, stream.dtype) if select_topk < 1 else None
    if select_topk < 1 and cut is None:  # nothing is selected
        yield from (block.origin for block in blocks)
        return
    energy = [0.0] * stream.count
    for _, deltas in _selected(blocks, cut):
        for i, delta in enumerate(deltas):
            energy[i] += float(delta.square().sum(dtype=torch.float64))
    total = math.fsum(energy)
    weights = [value / total if total else 1 / stream.count for value in energy]
    for block, deltas in _selected(blocks, cut):
        sign = majority(deltas)
        weighed = [delta.mul_(weight) for delta, weight in zip(deltas, weights, strict=True)]
        out = agreed(weighed, weights, sign, normalize=True).add_(block.origin)
        yield where_equal(block.tensors, out) if cut is None else out


def _cut(blocks: Iterable[Block], share: float, dtype: torch.dtype) -> Cut | None:
    """The smallest variance that is selected; None if none is."""

    def passes() -> Iterator[Sequence[Tensor]]:
        return ([_variance(block)] for block in blocks)

    count = int(share * sum(int(torch.count_nonzero(variance)) for (variance,) in passes()))
    return kth_largest(passes, [[count]], dtype)[0][0] if count else None


def _variance(block: Block) -> Tensor:
    """The variance of the task vectors, which equals that of the tensors; exactly zero where all are equal."""
    first, *others = block.tensors
    shifted = [tensor - first for tensor in others]
    mean = torch.zeros_like(first)
    for vector in shifted:
        mean.add_(vector, alpha=1 / len(block.tensors))
    out = mean.square()
    for vector in shifted:
        out.add_(vector.sub_(mean).square_())
    return out.div_(len(block.tensors))


def _selected(blocks: Iterable[Block], cut: Cut | None) -> Iterator[tuple[Block, list[Tensor]]]:
    largest = None if cut is None else Largest(cut)
    for block in blocks:
        deltas = block.deltas()
        if largest is not None:
            selected = largest(_variance(block)).sign_()  # one: where nothing varies, nothing is selected
            deltas = [delta.mul_(selected) for delta in deltas]
        yield block, deltas
