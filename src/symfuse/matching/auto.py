"""Which axes to match by default: those that help on real models (docs/pairs.md).

A model and its fine-tune have the same basis: attention and feed-forward axes are matched for completeness, heads and
the residual stream are not. Models whose weights are not similar need all axes: either they were trained
independently, or one of them was transformed by a symmetry. Only matching can tell which.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symfuse.matching.axes import AUTO, MATCHABLE, axes_of
from symfuse.model import Model

# The cosine is near 0 for models that were trained independently, and near 1 for a model and its fine-tune: 0.02 to
# 0.03 and 0.996 for the SCEPTR checkpoints.
SAME_BASIS = 0.5

INSIDE = ("attention", "ffn", "scan")  # the axes inside of heads and layers
SAMPLE = 16_384  # entries of each matrix: enough for two digits of a cosine


def auto_axes(axes: str | tuple[str, ...], models: Sequence[Model]) -> tuple[str | tuple[str, ...], float | None]:
    """The words that stand for AUTO, and the least cosine of the first model with another. Other words are returned as
    they are, with None.

    If all models are in the basis of the first, AUTO stands for those of INSIDE that they have; else for all that can
    be matched. The residual stream is left out if modules of sentence-transformers read the output of a model.
    """
    if axes not in (AUTO, (AUTO,)):
        return axes, None
    least = min((cosine(models[0], other) for other in models[1:]), default=1.0)
    read = any(model.checkpoint.readers() for model in models)
    every = tuple(word for word in MATCHABLE if not (read and word == "residual"))
    inside = tuple(word for word in INSIDE if axes_of(word, models[0].spec.axes)) or INSIDE
    return inside if least >= SAME_BASIS else every, least


def cosine(a: Model, b: Model) -> float:
    """The median cosine over the matrices that both models have with the same shape, from their first SAMPLE entries.
    1 if there are none. Vectors are left out, as gains of norms are near 1 in all models. A fixed table, such as one of
    sines, does not change the median."""
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
