"""Spherical linear interpolation of two models."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from symfuse.merging.stream import Stream
from symfuse.methods.parts.gram import arc, base_and_models, combine, gram
from symfuse.methods.registry import method

# The cosine above which mergekit, too, interpolates on the straight line.
STRAIGHT = 0.9995


@method(
    "slerp",
    label="SLERP",
    paper="Shoemake 1985, Animating rotation with quaternion curves, doi:10.1145/325165.325242",
    base="required",
    models=(1, 1),
)
def slerp(stream: Stream, *, t: float) -> Iterator[Tensor]:
    """The point at t on the arc from the base (t = 0) to the other model (t = 1), each tensor as one long vector.

    The vectors keep their lengths, and the length of the result goes from one to the other.
    On the straight line, (1-t) base + t other, if |cos θ| > 0.9995 or a tensor is zero; so equal tensors give
    themselves, and opposite ones (1-2t) base. t outside [0, 1] goes on beyond the models.
    """
    yield from combine(stream, base_and_models, arc(gram(stream, base_and_models), t, STRAIGHT))
