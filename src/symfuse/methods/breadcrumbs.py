"""Task vectors without their outliers and without their small entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.base import PerModel, method
from symfuse.merging.sparsify import Trim, per_model
from symfuse.merging.stream import Stream
from symfuse.methods.task_arithmetic import merged

PAPER = "Davari and Belilovsky 2024, Model breadcrumbs, arXiv 2312.06795"


@method("breadcrumbs", label="Breadcrumbs", paper=PAPER, base="required")
def breadcrumbs(
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
    """Of each task vector of n entries the int(gamma·n) largest are dropped and the next int(density·n) kept (fewer
    are dropped if else there are not enough; none if density is 1), then weighed and summed: see `merged`. rescale: the
    l1 norm of each vector stays what it was (`Trim`)."""
    densities = per_model(stream, "density", density, 0.0, 1.0)
    trim = _middle(stream, densities, gamma, rescale)
    return merged(stream, weight, densities, trim, vote=False, normalize=normalize, scale=lambda_)


@method("breadcrumbs_ties", label="Breadcrumbs with TIES", paper=PAPER, base="required")
def breadcrumbs_ties(
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
    """`breadcrumbs`, and only entries of the majority's sign are summed: see `merged`."""
    densities = per_model(stream, "density", density, 0.0, 1.0)
    trim = _middle(stream, densities, gamma, rescale)
    return merged(stream, weight, densities, trim, vote=True, normalize=normalize, scale=lambda_)


def _middle(stream: Stream, densities: Sequence[float], gamma: Sequence[float], rescale: bool) -> Trim:
    gammas = per_model(stream, "gamma", gamma, 0.0, 1.0)
    if 1 in gammas:
        raise OptionError(f"{stream.name}: gamma is 1, which would drop every entry; expected less")
    size = stream.rows * stream.columns
    kept = [int(density * size) for density in densities]
    dropped = [min(int(share * size), size - count) for share, count in zip(gammas, kept, strict=True)]
    return Trim(stream, dropped, kept, rescale)
