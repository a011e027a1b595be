"""One model, unchanged or scaled."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.registry import method


@method("passthrough", label="Passthrough", paper="no source: a copy", models=(1, 1))
def passthrough(stream: Stream, *, scale: PerModel = (1.0,)) -> Iterator[Tensor]:
    """The tensor times `scale`; the same bits if that is 1."""
    for block in stream:
        yield block.tensors[0].mul_(scale[0])
