"""Move the base towards another model, by a bounded amount in each entry."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.stream import Stream
from symfuse.methods.registry import method


@method(
    "nearswap",
    label="NearSwap",
    paper="alchemonaut 2024, QuartetAnemoi-70B, huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001",
    base="required",
    models=(1, 1),
)
def nearswap(stream: Stream, *, t: float) -> Iterator[Tensor]:
    """base + clamp(other - base, -t, t): the other model's entry itself where it is within t of the base's.

    The method is published as a weighted mean with weight min(1, t / |other - base|), which is the same thing without
    its division by zero. (mergekit keeps |other - base| above 1e-6, and so moves less if t is below that.)
    OptionError if t is negative.
    """
    if t < 0:
        raise OptionError(f"t is {t}, expected at least 0: the largest change of an entry")
    for block in stream:
        (other,) = block.tensors
        step = other - block.origin
        yield torch.where(step.abs() <= t, other, block.origin + step.clamp(-t, t))
