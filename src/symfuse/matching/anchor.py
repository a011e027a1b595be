"""The default anchor of several models: the one nearest to the mean of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symfuse.model import Model, require_same_shape


def nearest_to_mean(models: Sequence[Model]) -> int:
    """The index of the model with the least Euclidean distance to the mean of the base models, read tensor by tensor.

    Two models are equally near: then the last, so that `merge A B` aligns A with B.
    """
    require_same_shape(models)
    spec = models[0].spec
    squares = torch.zeros(len(models), dtype=torch.float64, device=models[0].checkpoint.device)
    for name in spec.tensors:
        if name in spec.heads or name in spec.tied:
            continue
        stack = torch.stack([model.read(name).double().flatten() for model in models])
        squares += torch.linalg.vecdot(gap := stack - stack.mean(0), gap)
    nearest = squares <= squares.min() * (1 + 1e-9)
    return int(nearest.nonzero().max())
