"""Fewer cases than a full product, without an untested pair."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def covering(*axes: Sequence[Any]) -> list[Any]:
    """The product of these axes as pytest's parameters. All are slow but those that together have every combination
    of values on all axes but any one: of two axes every value, of three every pair."""
    modulus = min(map(len, axes))
    cases = []
    for at in product(*(range(len(axis)) for axis in axes)):
        values = (axis[i] for axis, i in zip(axes, at, strict=True))
        cases.append(pytest.param(*values, marks=() if sum(at) % modulus == 0 else pytest.mark.slow))
    return cases
