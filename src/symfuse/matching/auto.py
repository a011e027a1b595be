"""Which axes to match by default: those that are worth it on real models (docs/pairs.md).

A model and its fine-tune lie in one basin, in one basis: attention and feed-forward are matched for completeness;
the order of heads and the residual stream are kept. Models whose weights are not similar need all axes: they were
trained apart, or one is in another basis (transformed by a symmetry); only matching distinguishes these cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symfuse.matching.axes import AUTO, MATCHABLE, axes_of
from symfuse.model import Model

# Models that were trained apart have a cosine near 0, a model and its fine-tune one near 1: 0.02 to 0.03 and 0.996 for
# the SCEPTR checkpoints.
SAME_BASIS = 0.5

INSIDE = ("attention", "ffn", "scan")  # the axes inside of heads and layers
SAMPLE = 16_384  # entries of each matrix: enough for two digits of a cosine


def auto_axes(axes: str | tuple[str, ...], models: Sequence[Model]) -> tuple[str | tuple[str, ...], float | None]:
    """The words for the axes where they are AUTO, else as they are: those INSIDE that it has if all are in the basis of
    the first, else all that can be matched: not the residual stream where modules of sentence-transformers behind a
    model read its units. With the least cosine of the first model with another; None: not looked at.
    """
    if axes not in (AUTO, (AUTO,)):
        return axes, None
    least = min((cosine(models[0], other) for other in models[1:]), default=1.0)
    read = any(model.checkpoint.readers() for model in models)
    every = tuple(word for word in MATCHABLE if not (read and word == "residual"))
    inside = tuple(word for word in INSIDE if axes_of(word, models[0].spec.axes)) or INSIDE
    return inside if least >= SAME_BASIS else every, least


def cosine(a: Model, b: Model) -> float:
    """The median of the cosines of all matrices that both have in one shape, by their first entries. Vectors are left
    out, as gains of norms are near 1 in models that have nothing in common, and so no table that is fixed, such as one
    of sines, decides. 1 if there is nothing to compare."""
    cosines = []
    for name in a.spec.tensors:
        if not a.spec.shares(name, b.spec):
            continue
        parts = []
        for model in (a, b):
            file = model.spec.file_name(name)
            info = model.whole.info(file) if file in model.whole else None
            if info is not None and len(info.shape) > 1 and info.dtype.is_floating_point:
                parts.append(model.whole.part(file, 0, min(SAMPLE, info.numel)).double())
        if len(parts) == 2 and parts[0].shape == parts[1].shape:
            cosines.append(torch.cosine_similarity(parts[0], parts[1], dim=0))
    return float(torch.stack(cosines).median()) if cosines else 1.0
