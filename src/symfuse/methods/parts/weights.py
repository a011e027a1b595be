"""Weights that sum to one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from symfuse.errors import OptionError


def normalized(weights: Sequence[float], key: str = "normalize") -> list[float]:
    """Weights divided by their sum; OptionError if that is not above zero, where dividing would make no sense.
    key: the parameter that turns this off, if there is one."""
    off = f"take them as they are (`{key}: false` under `parameters` of a recipe, --set {key}=false"
    off += ", --no-normalize)" if key == "normalize" else ")"
    off = off if key else "give weights whose sum is above zero"
    if not all(math.isfinite(w) for w in weights):
        raise OptionError(f"weights {list(weights)}: each must be a finite number")
    total = math.fsum(weights)
    if abs(total) <= 1e-12 * max(map(abs, weights), default=0.0):
        raise OptionError(f"weights {list(weights)} sum to zero and cannot be normalised; {off}")
    if total < 0:
        raise OptionError(
            f"weights {list(weights)} sum to less than zero, so normalising would turn their signs; {off}"
        )
    return [w / total for w in weights]
