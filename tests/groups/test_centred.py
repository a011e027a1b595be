"""Rotations that keep the mean, against brute force on small sizes and against LayerNorm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from symfuse.errors import SymmetryError
from symfuse.groups import Centred, Moments, Orthogonal, Similarity


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=rng(seed), dtype=torch.float64)


def moments(x: Tensor, y: Tensor) -> Moments:
    return Moments(x @ y.mT, x.square().sum(-1), y.square().sum(-1))


def everything(d: int) -> Tensor:
    """Every element for d = 2, and a fine grid of them for d = 3, from an orthonormal basis of the complement."""
    ones = torch.ones(d, 1, dtype=torch.float64) / math.sqrt(d)
    basis = torch.linalg.svd(ones).U[:, 1:]
    if d == 2:
        turns = torch.tensor([[[1.0]], [[-1.0]]], dtype=torch.float64)
    else:
        angle = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)[:-1]
        c, s = angle.cos(), angle.sin()
        turn = torch.stack((torch.stack((c, -s), -1), torch.stack((s, c), -1)), -2)
        turns = torch.cat((turn, turn * torch.tensor([1.0, -1.0], dtype=torch.float64)))
    rest = basis @ turns @ basis.T
    return torch.cat((rest + ones @ ones.T, rest - ones @ ones.T))


@pytest.mark.parametrize("d", [2, 3])
def test_against_all_of_them(d: int) -> None:
    circle = everything(d)
    answers = set()
    for seed in range(20):
        x, y = normal(d, 4, seed=seed), normal(d, 4, seed=100 + seed)
        q = Centred().best({"primal": moments(x, y)}).matrix
        reached = (x - q @ y).square().sum().item()
        least = (x - circle @ y).square().sum((-2, -1)).min().item()
        assert least - 1e-6 <= reached <= least + 1e-9  # the grid is within 1e-6 of the optimum
        answers.add((round(q.sum().item() / d), round(torch.linalg.det(q).item())))
    assert answers == {(1, 1), (1, -1), (-1, 1), (-1, -1)}, "all four components must have been the answer"


def test_size_one_is_a_sign() -> None:
    for x, sign in ((2.0, 1.0), (-2.0, -1.0)):
        one = torch.ones(1, 1, dtype=torch.float64)
        assert torch.equal(Centred().best({"primal": moments(x * one, one)}).matrix, sign * one)


@pytest.mark.parametrize("d", [1, 2, 3, 7, 64])
def test_it_commutes_with_layer_norm_up_to_the_sign(d: int) -> None:
    q = Centred().random(d, (), rng(d)).matrix
    x = normal(5, d)
    torch.testing.assert_close(layer_norm(x @ q.T, (d,)), layer_norm(x, (d,)) @ q.T)


@pytest.mark.parametrize("d", [2, 3, 7, 64])
def test_a_generic_rotation_is_not_one(d: int) -> None:
    q = Orthogonal().random(d, (), rng(d))
    assert Orthogonal().contains(q, 1e-9)
    assert not Centred().contains(q, 1e-9)
    x = normal(5, d)
    moved = layer_norm(x @ q.matrix.T, (d,)) - layer_norm(x, (d,)) @ q.matrix.T
    assert moved.abs().max() > 0.1


def test_a_reflection_of_one_half_of_the_batch_is_still_told() -> None:
    good = Centred().random(5, (2,), rng()).matrix
    bad = good.clone()
    bad[1, 0] *= -1
    assert Centred().contains(Similarity(good), 1e-9)
    assert not Centred().contains(Similarity(bad), 1e-9)


def test_no_permutation_part() -> None:
    with pytest.raises(SymmetryError, match=r"no permutation part.*fold the gain first"):
        Centred().best({"plain": moments(normal(3, 3), normal(3, 3))})
