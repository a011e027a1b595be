"""Task vectors trimmed to their largest entries, a vote on signs, and the mean of those that agree."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.parts.sparsify import Trim
from symfuse.methods.parts.task_vectors import combined
from symfuse.methods.registry import method


@method("ties", label="TIES", paper="Yadav et al. 2023, TIES-merging, arXiv 2306.01708", base="required")
def ties(
    stream: Stream,
    *,
    weight: PerModel = (1.0,),
    density: PerModel = (1.0,),
    normalize: bool = True,
    rescale: bool = False,
    lambda_: float = 1.0,
    int8_mask: bool = False,  # noqa: ARG001
) -> Iterator[Tensor]:
    """The max(1, int(density·n)) largest of the n entries of each task vector are kept (the first of equal ones; all if
    density is 1, none if it is 0), then weighted and summed where they have the majority's sign (see `combined`).
    rescale: keep the l1 norm of each vector (`Trim`)."""

    def largest(stream: Stream, densities: list[float]) -> Trim:
        size = stream.rows * stream.columns
        kept = [max(1, int(share * size)) for share in densities]
        return Trim(stream, [0] * len(kept), kept, rescale)

    return combined(stream, weight, density, largest, vote=True, normalize=normalize, scale=lambda_)
