"""One block: the best element of an axis instance for its moments, never worse than the identity."""

from __future__ import annotations

import torch
from torch import Tensor

from symfuse.groups import Element, Group, PartMoments, objective


def improve(group: Group, moments: PartMoments) -> tuple[Element, Tensor, Tensor, Tensor]:
    """The best element, the objective before and after, and whether it is better, each [*b]. Where it is not better,
    the element is the identity."""
    best = group.best(moments)
    identity = group.identity(best.size, best.batch).to(best.device)
    before, after = objective(identity, moments), objective(best, moments)
    # A gain must exceed the rounding errors: of the moments in their dtype, and of the sums over them in float64.
    parts = list(moments.values())
    eps = max([torch.finfo(m.dtype).eps for m in parts]) + 16 * torch.finfo(torch.float64).eps
    better = after < before - eps * sum([m.size for m in parts])
    if not bool(better.all()):
        unit = identity.tensors()
        kept = {
            key: torch.where(
                better.reshape((*better.shape, *[1] * (t.ndim - better.ndim))), t, unit.get(key, torch.ones_like(t))
            )
            for key, t in best.tensors().items()
        }
        best = best.rebuild(kept)
    return best, before, torch.where(better, after, before), better
