"""Task vectors added to a base."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.parts.sparsify import Sparsifier
from symfuse.methods.parts.task_vectors import combined
from symfuse.methods.registry import method


@method(
    "task_arithmetic",
    label="Task arithmetic",
    paper="Ilharco et al. 2023, Editing models with task arithmetic, arXiv 2212.04089",
    base="required",
    ignored=("density", "rescale"),
)
def task_arithmetic(
    stream: Stream,
    *,
    weight: PerModel = (1.0,),
    density: PerModel = (1.0,),  # noqa: ARG001
    normalize: bool = False,
    rescale: bool = False,  # noqa: ARG001
    lambda_: float = 1.0,
    int8_mask: bool = False,  # noqa: ARG001
) -> Iterator[Tensor]:
    """base + λ Σ wᵢ δᵢ, divided by Σ wᵢ if `normalize`. density, rescale and, here as in all methods that take it,
    int8_mask have no effect: recipes may have them."""
    return combined(stream, weight, (1.0,), Sparsifier, vote=False, normalize=normalize, scale=lambda_)
