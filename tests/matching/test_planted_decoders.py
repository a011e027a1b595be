"""Planted elements and translations of fused, grouped and partly rotary heads are found again from weights."""

from __future__ import annotations

import pytest

import symfuse
from contract.tiny import case
from symfuse.alignment import random_alignment

LABELS = (
    *("neox-lm", "gptj-lm", "falcon-lm", "falcon-alibi", "falcon-grouped", "falcon-grouped-alibi", "falcon-by-head"),
    *("opt-lm", "opt-post-lm", "bloom-lm", "mpt-lm", "mpt-lm-clipped"),
)


@pytest.mark.parametrize("label", LABELS)
def test_a_planted_alignment_is_found(label: str) -> None:
    this = case(label)
    axes = {instance.axis for instance in this.spec.movable} - {"residual"}
    anchor = random_alignment(this.spec, 5, axes)(this.checkpoint)
    found = symfuse.match(this.checkpoint, to=anchor, axes=tuple(sorted(axes)))
    moved = found(this.checkpoint)
    left = sum(float((moved[name] - anchor[name]).square().sum()) for name in anchor) ** 0.5
    before = sum(float((this.checkpoint[name] - anchor[name]).square().sum()) for name in anchor) ** 0.5
    assert left < 1e-5 * before
    assert this.error(moved, found) < this.exact
