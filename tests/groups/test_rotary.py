"""What may act on the planes of rotary position embeddings: against the rotations of all positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from symfuse.groups import GROUPS, Conformal, Monomial, Phase, Rotary, Sign, Similarity

POSITIONS = (0, 1, 7, 100)
PLANES = 3
WITHIN_PLANES = pytest.mark.parametrize("group", [Rotary(), Phase(), Sign()], ids=lambda group: group.name)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def turn(angle: Tensor) -> Tensor:
    c, s = angle.cos(), angle.sin()
    return torch.stack((torch.stack((c, -s), -1), torch.stack((s, c), -1)), -2)


def at_position(position: int) -> Tensor:
    """The rotation of each plane by its own frequency, [planes, 2, 2]."""
    frequency = 10000.0 ** (-torch.arange(PLANES, dtype=torch.float64) / PLANES)
    return turn(position * frequency)


def matrix(planes: Tensor) -> Tensor:
    """A block for each plane."""
    return torch.block_diag(*planes)


@WITHIN_PLANES
def test_it_commutes_with_every_position(group: Rotary | Phase | Sign) -> None:
    g = group.random(2, (PLANES,), rng())
    for position in POSITIONS:
        rotation = at_position(position)
        for dense in (g.to_dense(), g.dual().to_dense()):
            torch.testing.assert_close(dense @ rotation, rotation @ dense)


@WITHIN_PLANES
def test_scores_stay_as_they_are(group: Rotary | Phase | Sign) -> None:
    """⟨R(m) q, R(n) k⟩ for queries that follow g and keys that follow its dual."""
    g = group.random(2, (PLANES,), rng(1))
    q, k = (torch.randn(2 * PLANES, generator=rng(seed), dtype=torch.float64) for seed in (2, 3))
    for m in POSITIONS:
        for n in POSITIONS:
            rotated, other = matrix(at_position(m)), matrix(at_position(n))
            moved = (rotated @ matrix(g.to_dense()) @ q) @ (other @ matrix(g.dual().to_dense()) @ k)
            torch.testing.assert_close(moved, (rotated @ q) @ (other @ k))


def test_what_does_not_commute_is_not_contained() -> None:
    reflection = Similarity(torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)))
    swap = Monomial(torch.tensor([1, 0]))
    flip = Monomial(torch.tensor([0, 1]), torch.tensor([1.0, -1.0], dtype=torch.float64))
    for g in (reflection, swap, flip, GROUPS["invertible"].random(2, (), rng())):
        rotation = at_position(1)[0]
        assert not torch.allclose(g.to_dense() @ rotation, rotation @ g.to_dense())
        assert not any(group.contains(g, 1e-6) for group in (Rotary(), Phase(), Sign()))
    assert Conformal().contains(reflection, 1e-12)  # as an orthogonal map it is one


def test_one_reflected_plane_of_many_is_seen() -> None:
    planes = Phase().random(2, (PLANES,), rng()).matrix
    planes[-1] = planes[-1].flip(0)
    assert not Rotary().contains(Similarity(planes), 1e-6)
    assert Rotary().contains(Similarity(planes[:-1]), 1e-12)


def test_a_mix_of_planes_is_not_contained() -> None:
    """Two planes of unlike frequencies turned into each other: no group of planes acts on four units."""
    mix = Conformal().random(4, (), rng())
    rotation = matrix(at_position(1)[:2])
    assert not torch.allclose(mix.to_dense() @ rotation, rotation @ mix.to_dense())
    swap = Monomial(torch.tensor([2, 3, 0, 1]))  # of whole planes
    assert not torch.allclose(swap.to_dense() @ rotation, rotation @ swap.to_dense())
    for g in (mix, swap):
        assert not any(group.contains(g, 1e-6) for group in (Rotary(), Phase()))
    assert (Rotary.size, Phase.size) == (2, 2)


def test_normalised_queries_leave_a_sign() -> None:
    """With a gain of their own for both units, a phase changes the scores and a sign does not."""
    gain = torch.tensor([0.5, 2.0], dtype=torch.float64)
    q, k = (torch.randn(2, generator=rng(seed), dtype=torch.float64) for seed in (5, 6))
    phase = Similarity(turn(torch.tensor(0.7, dtype=torch.float64)))

    def score(dense: Tensor) -> Tensor:
        one, other = (gain * (dense @ v) / v.norm() for v in (q, k))
        return one @ other

    same = score(torch.eye(2, dtype=torch.float64))
    negative = Monomial(torch.arange(2), -torch.ones(2, dtype=torch.float64))
    assert Sign().contains(negative, 1e-12)
    torch.testing.assert_close(score(negative.to_dense()), same)
    assert not torch.allclose(score(phase.to_dense()), same)
    # So the gain may be a plain dimension of that axis: a sign has a permutation part, which is the identity.
    assert negative.forget().is_identity()
