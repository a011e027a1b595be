"""The largest entries of a streamed tensor, without sorting it or holding it in memory, and trimming by magnitude.

On the CPU block entries are compared by numpy, five to ten times as fast as by torch, whose comparisons take longer
than all arithmetic of a merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from symfuse.errors import OptionError
from symfuse.merging.stream import Block, Stream

DIGIT = 16  # bits of a float that one pass examines


def where(condition: Callable[..., Any], *values: Tensor) -> Tensor:
    """The condition's result for the values, arrays or tensors alike: booleans of their shape."""
    if all(value.is_cpu for value in values):
        return torch.from_numpy(np.asarray(condition(*(value.numpy() for value in values))))
    result: Tensor = condition(*values)
    return result


def count(condition: Callable[[Any], Any], values: Tensor) -> int:
    """The number of entries at which the condition holds."""
    if values.is_cpu:
        return int(np.count_nonzero(condition(values.numpy())))
    return int(torch.count_nonzero(condition(values)))


def select(condition: Callable[[Any], Any], values: Tensor) -> Tensor:
    """The entries at which the condition holds, flat."""
    if values.is_cpu:
        array = values.numpy()
        return torch.from_numpy(array.take(np.flatnonzero(condition(array))))
    return values[condition(values)]


def as_factors(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Booleans as ones and zeros, by which torch multiplies much faster."""
    return mask.view(torch.uint8).to(dtype)


def per_model(stream: Stream, name: str, values: Sequence[float], low: float, high: float) -> list[float]:
    """One value for each model, perhaps the same for all; OptionError if one is not in [low, high] or not finite."""
    if len(values) not in (1, stream.count):
        raise OptionError(f"{stream.name}: {len(values)} values of {name} for {stream.count} models; give one for each")
    out = list(values) * (stream.count if len(values) == 1 else 1)
    for number, (value, source) in enumerate(zip(out, stream.sources, strict=True), 1):
        if not (low <= value <= high and math.isfinite(value)):
            span = f"{low:g} to {high:g}" if math.isfinite(high - low) else "a finite number"
            raise OptionError(
                f"{stream.name}: {name} of {source.model or f'model {number}'} is {value}, expected {span}"
            )
    return out


def repeatable(stream: Stream) -> Iterable[Block]:
    """The blocks, for iterating several times without overwriting them; a tensor of one block is read once."""
    return list(stream) if len(stream) == 1 else stream


@dataclass(frozen=True)
class Cut:
    """The k-th largest entry, and how many of the entries equal to it are among the k largest."""

    value: float
    equal: int


@dataclass
class Largest:
    """Selects the k largest magnitudes of a tensor, the first of equal ones; called with all blocks in order."""

    cut: Cut
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.cut.equal

    def __call__(self, values: Tensor) -> Tensor:
        """A block, with zeros in place of all other entries."""
        value = self.cut.value
        # Zeros need no selection, and after the last equal entry none is left.
        if value == 0 or self.left == 0:
            return hardshrink(values, value)
        limit = torch.tensor(value, dtype=values.dtype)
        kept = hardshrink(values, torch.nextafter(limit, torch.zeros_like(limit)).item())
        equal = count(lambda entries: abs(entries) == value, kept)
        if equal > self.left:
            late = kept.abs().flatten().eq(value).nonzero().squeeze(1)[self.left :]
            kept.view(-1)[late] = 0
        self.left -= min(equal, self.left)
        return kept


def kth_largest(
    passes: Callable[[], Iterator[Sequence[Tensor]]], ranks: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[list[Cut]]:
    """For each streamed quantity, its k-th largest entries for each k (from 1 to the number of entries).

    passes: an iterator over blocks, each a list of tensors of `dtype` (float32 or float64), one for each quantity, none
    negative; the same at each call. Such floats are ordered as their bit patterns are, so this is a radix selection:
    a pass counts the next DIGIT bits of the entries that begin as the one looked for. Two passes do for float32, four
    for float64. Exact; holds a histogram for each rank.
    """
    integer, length = (torch.int32, 31) if dtype == torch.float32 else (torch.int64, 63)  # without the sign
    # For each rank: the leading bits of that entry, and its rank among the entries that have them.
    leading = [[(0, k) for k in ks] for ks in ranks]
    for stop in range(DIGIT, length + DIGIT, DIGIT):
        rest = max(0, length - stop)
        digit = length - rest - (stop - DIGIT)
        counts = [{prefix: torch.zeros(2**digit, dtype=torch.int64) for prefix, _ in pairs} for pairs in leading]
        for values in passes():
            for value, histograms in zip(values, counts, strict=True):
                bits = value.view(integer).flatten()
                for prefix, histogram in histograms.items():
                    histogram += torch.bincount(_digits(bits, prefix, digit, rest), minlength=2**digit).cpu()
        leading = [
            [_next_digit(histograms[prefix], prefix << digit, k) for prefix, k in pairs]
            for histograms, pairs in zip(counts, leading, strict=True)
        ]
    return [[Cut(torch.tensor(bits, dtype=integer).view(dtype).item(), k) for bits, k in pairs] for pairs in leading]


def _digits(bits: Tensor, prefix: int, digit: int, rest: int) -> Tensor:
    """The next digit of the entries that begin with the prefix; behind it are `rest` bits. The first digit is that of
    all, as none has a sign."""
    if bits.itemsize * 8 == 1 + digit + rest:
        return bits >> rest
    return (select(lambda entries: entries >> (digit + rest) == prefix, bits) >> rest) - (prefix << digit)


def _next_digit(histogram: Tensor, prefix: int, k: int) -> tuple[int, int]:
    """The prefix with the digit of the k-th largest entry, and its rank among the entries with that digit."""
    from_top = histogram.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, k))
    digit = len(histogram) - 1 - place
    return prefix | digit, k - int(from_top[place] - histogram[digit])


class Sparsifier:
    """Drops entries of task vectors (the base class: none). `prepare` is called once, with the models that it will be
    used for; then the object itself, with each block of each model in order."""

    def __init__(self, stream: Stream, densities: Sequence[float]) -> None:
        """densities: of each model, the share of its entries that is kept."""

    def prepare(self, blocks: Iterable[Block], models: Sequence[int]) -> None:
        """Look at all blocks, as often as needed."""

    def __call__(self, model: int, block: Block, delta: Tensor) -> Tensor:  # noqa: ARG002
        """The sparse delta of a block, (rows, columns); perhaps in its place."""
        return delta


class Trim(Sparsifier):
    """Keeps exactly `kept` entries of each model after the `dropped` largest in magnitude; of equal magnitudes the
    first count as larger.

    rescale: multiplies the kept entries so that the l1 norm of the whole tensor does not change (sums in float64),
    unless all kept entries are zero.
    """

    def __init__(self, stream: Stream, dropped: Sequence[int], kept: Sequence[int], rescale: bool) -> None:
        self._dtype = stream.dtype
        self._ranks = [[below, below + count] for below, count in zip(dropped, kept, strict=True)]
        self._rescale = rescale
        self._factors: dict[int, float] = {}
        self._largest: dict[int, list[Largest]] = {}

    def prepare(self, blocks: Iterable[Block], models: Sequence[int]) -> None:
        if not models:
            return

        def passes() -> Iterator[list[Tensor]]:
            for block in blocks:
                yield [(block.tensors[i] - block.origin).abs_() for i in models]

        ranks = [[k for k in self._ranks[i] if k] for i in models]
        cuts = dict(zip(models, kth_largest(passes, ranks, self._dtype), strict=True))
        self._restart(cuts)
        self._factors = dict.fromkeys(models, 1.0)
        if self._rescale:
            before, after = [0.0] * len(models), [0.0] * len(models)
            for values in passes():
                for i, (model, value) in enumerate(zip(models, values, strict=True)):
                    before[i] += float(value.sum(dtype=torch.float64))
                    after[i] += float(self._kept(model, value).sum(dtype=torch.float64))
            self._factors = {m: b / a if a else 1.0 for m, b, a in zip(models, before, after, strict=True)}
            self._restart(cuts)

    def __call__(self, model: int, block: Block, delta: Tensor) -> Tensor:  # noqa: ARG002
        kept = self._kept(model, delta)
        return kept if self._factors[model] == 1 else kept.mul_(self._factors[model])

    def _restart(self, cuts: Mapping[int, list[Cut]]) -> None:
        self._largest = {model: [Largest(cut) for cut in of_model] for model, of_model in cuts.items()}

    def _kept(self, model: int, values: Tensor) -> Tensor:
        """The kept entries: those among the largest, without the dropped ones."""
        if not self._largest[model]:
            return torch.zeros_like(values)
        *dropped, kept = [largest(values) for largest in self._largest[model]]
        return kept.sub_(dropped[0]) if dropped else kept
