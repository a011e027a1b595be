"""Task vectors without their outliers and without their small entries."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.base import Merge, PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.parts.sparsify import Trim, per_model
from symfuse.methods.parts.task_vectors import combined
from symfuse.methods.registry import method

PAPER = "Davari and Belilovsky 2024, Model breadcrumbs, arXiv 2312.06795"


def _breadcrumbs(*, vote: bool) -> Merge:
    def merge(
        stream: Stream,
        *,
        weight: PerModel = (1.0,),
        density: PerModel = (1.0,),
        gamma: PerModel = (0.01,),
        normalize: bool = False,
        rescale: bool = False,
        lambda_: float = 1.0,
        int8_mask: bool = False,  # noqa: ARG001
    ) -> Iterator[Tensor]:
        """The int(gamma·n) largest of the n entries of each task vector are dropped, and the next int(density·n) kept
        (fewer are dropped if too few would remain; none if density is 1), then weighted and summed (see `combined`).
        rescale: keep the l1 norm of each vector (`Trim`)."""

        def middle(stream: Stream, densities: list[float]) -> Trim:
            gammas = per_model(stream, "gamma", gamma, 0.0, 1.0)
            if 1 in gammas:
                raise OptionError(f"{stream.name}: gamma is 1, which would drop every entry; expected less")
            size = stream.rows * stream.columns
            kept = [int(density * size) for density in densities]
            dropped = [min(int(share * size), size - count) for share, count in zip(gammas, kept, strict=True)]
            return Trim(stream, dropped, kept, rescale)

        return combined(stream, weight, density, middle, vote=vote, normalize=normalize, scale=lambda_)

    return merge


breadcrumbs = method("breadcrumbs", label="Breadcrumbs", paper=PAPER, base="required")(_breadcrumbs(vote=False))
method("breadcrumbs_ties", label="Breadcrumbs with TIES", paper=PAPER, base="required")(_breadcrumbs(vote=True))
