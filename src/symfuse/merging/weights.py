"""Weights that sum to one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from symfuse.errors import OptionError


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum; OptionError if that is not above zero, where dividing would make no sense."""
    if not all(math.isfinite(w) for w in weights):
        raise OptionError(f"weights {list(weights)}: each must be a finite number")
    try:
        total = math.fsum(weights)
    except OverflowError:
        raise OptionError(f"weights {list(weights)}: their sum is too large for a number; make them smaller") from None
    if abs(total) <= 1e-12 * max(map(abs, weights), default=0.0):
        raise OptionError(f"weights {list(weights)} sum to zero and cannot be normalised; turn normalisation off")
    if total < 0:
        raise OptionError(
            f"weights {list(weights)} sum to less than zero, so normalising would turn their signs; turn it off"
        )
    return [w / total for w in weights]
