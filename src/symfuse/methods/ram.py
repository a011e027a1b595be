"""Task vectors averaged where they overlap and kept where only one model changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.stream import Block, Stream
from symfuse.methods.parts.sparsify import repeatable
from symfuse.methods.registry import method

PAPER = "Yuan et al. 2026, Behavior knowledge merge in reinforced agentic models, arXiv 2601.13572"


@method("ram", label="RAM", paper=PAPER, base="required")
def ram(stream: Stream, *, epsilon: float = 1e-5) -> Iterator[Tensor]:
    """A model changes an entry if its task vector is larger than `epsilon` there. The change of a single model is added
    to the base, of several models their mean. OptionError if epsilon is negative."""
    _require(stream, epsilon=epsilon)
    for block in stream:
        yield _merged(block, epsilon, [1.0] * stream.count)


@method("ramplus_tl", label="RAM+ (tensor-local)", paper=PAPER, base="required")
def ramplus_tl(stream: Stream, *, r: float = 0.1, alpha: float = 0.2, epsilon: float = 1e-5) -> Iterator[Tensor]:
    """`ram`, with the changes of a single model multiplied by 1 + r·min(alpha, s/u), where s and u are the numbers of
    entries of this tensor that it changes together with others and alone (s/u is 0 if it changes none). OptionError if
    alpha or epsilon is negative."""
    _require(stream, epsilon=epsilon, alpha=alpha)
    shared, alone = [0] * stream.count, [0] * stream.count
    blocks = repeatable(stream)
    for block in blocks:
        _, changes, number = _changes(block, epsilon)
        unique = number == 1
        for i, change in enumerate(changes):
            own = int(torch.count_nonzero(change & unique))
            alone[i] += own
            shared[i] += int(torch.count_nonzero(change)) - own
    ratios = [s / u if u else alpha * (s > 0) for s, u in zip(shared, alone, strict=True)]
    factors = [1 + r * min(alpha, ratio) for ratio in ratios]
    for block in blocks:
        yield _merged(block, epsilon, factors)


def _merged(block: Block, epsilon: float, factors: Sequence[float]) -> Tensor:
    """factors: of each model, for entries that it alone changes."""
    deltas, changes, number = _changes(block, epsilon)
    unique = number == 1
    number.clamp_(min=1)
    out = torch.zeros_like(block.origin)
    for delta, change, factor in zip(deltas, changes, factors, strict=True):
        delta.mul_(change).div_(number)
        out.add_(delta if factor == 1 else delta.addcmul_(delta, unique, value=factor - 1))
    return out.add_(block.origin)


def _changes(block: Block, epsilon: float) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Task vectors, which entries each model changes, and how many models change each entry."""
    deltas = block.deltas()
    changes = [delta.abs() > epsilon for delta in deltas]
    number = torch.zeros_like(block.origin)
    for change in changes:
        number.add_(change)
    return deltas, changes, number


def _require(stream: Stream, **values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise OptionError(f"{stream.name}: {name} is {value}, expected 0 or more")
