"""Recompute the running means and variances of batch normalisation at a point between models.

Averaged like weights they are wrong (Jordan et al. 2023, REPAIR, Section 3; Izmailov et al. 2018, SWA, Section 3.2):
they are measured again on data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from symfuse.errors import OptionError


def renew_statistics(module: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> int:
    """Measure the running statistics of all batch normalisation again, as means over the batches (of module inputs by
    name). Returns the number of layers that have them. All other parts stay in evaluation mode, and all modes are
    restored."""
    layers: list[Any] = [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
    ]
    if not layers:
        return 0
    before = [(layer, layer.training, layer.momentum) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a mean over all batches
        layer.train()
    seen = 0
    try:
        with torch.no_grad():
            for batch in batches:
                module(**{name: field.to(layers[0].running_mean.device) for name, field in batch.items()})
                seen += 1
    finally:
        for layer, training, momentum in before:
            layer.training, layer.momentum = training, momentum
    if not seen:
        raise OptionError("there are no batches to take the statistics of batch normalisation from")
    return len(layers)
