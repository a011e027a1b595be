"""Inputs for modules of which nothing is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from symfuse.verification.guess import guessed


class Flat(nn.Module):
    """Reads images of so many pixels. sides: of the images that it really ran on."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.conv, self.map = nn.Conv2d(3, 1, 1), nn.Linear(pixels, 2)
        self.sides: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sides += [] if images.is_meta else [images.shape[-1]]
        out: Tensor = self.map(self.conv(images).flatten(1))
        return out


@pytest.mark.parametrize("side", [7, 43, 100])
def test_the_size_of_images_is_found_by_shapes_alone(side: int) -> None:
    net = Flat(side**2)
    found = guessed(net)
    assert found is not None
    assert found["images"].shape == (2, 3, side, side)
    assert net.sides == [32, 224, side]
    assert not any(one.is_meta for one in net.state_dict().values())
    assert torch.equal(found["images"], guessed(Flat(side**2))["images"])  # type: ignore[index]


def test_a_net_that_runs_on_no_square_runs_on_few_images() -> None:
    net = Flat(5)
    assert guessed(net) is None
    assert net.sides == [32, 224, 5, 5]  # then vectors
