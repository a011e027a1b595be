"""Nuclear norms: what the best rotation is worth."""

from __future__ import annotations

import pytest
import torch

from symfuse.groups import nuclear_norms
from symfuse.groups.orthogonal import polar


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("batch", [(), (3,), (4, 3)], ids=str)
@pytest.mark.parametrize("n", [1, 2, 16, 64])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_equals_what_the_polar_factor_reaches(n: int, batch: tuple[int, ...], scale: float) -> None:
    c = scale * normal(*batch, n, n)
    torch.testing.assert_close(nuclear_norms(c), (polar(c) * c).sum((-2, -1)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_of_singular_matrices(rank: int) -> None:
    c = normal(5, 32, rank) @ normal(5, rank, 32)
    torch.testing.assert_close(nuclear_norms(c), (polar(c) * c).sum((-2, -1)), rtol=1e-12, atol=1e-12)


def test_half_precision_is_summed_in_float64() -> None:
    c = normal(3, 8, 8).bfloat16()
    assert nuclear_norms(c).dtype == torch.float64
    torch.testing.assert_close(nuclear_norms(c), (polar(c.double()) * c).sum((-2, -1)), rtol=1e-12, atol=0)
