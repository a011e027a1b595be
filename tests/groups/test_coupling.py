"""Couplings: plans of optimal transport against brute force, against the formula written out, and in their limits."""

from __future__ import annotations

import itertools
import math
import sys

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symfuse.errors import OptionError, SymmetryError
from symfuse.groups import (
    ELEMENTS,
    GROUPS,
    Coupling,
    Moments,
    Monomial,
    Permutation,
    Sinkhorn,
    compose,
    objective,
    sinkhorn,
)
from symfuse.groups.coupling import coupling


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(x: Tensor, y: Tensor) -> Moments:
    return Moments(x @ y.mT, x.square().sum(-1), y.square().sum(-1))


def costs(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y).square()


def best(x: Tensor, y: Tensor, regularisation: float) -> Tensor:
    return Sinkhorn(regularisation).best({"primal": moments(x, y)}).matrix


def permuted(n: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Source units, in another order those of the anchor, and that order."""
    y = normal(n, 2 * n, seed=seed)
    index = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return y[index] + noise * normal(n, 2 * n, seed=seed + 1), y, index


def written_out(c: Tensor, epsilon: float, iterations: int = 20_000) -> Tensor:
    """n T with Sinkhorn's two lines, in logarithms."""
    n = len(c)
    f, g = c.new_zeros(n), c.new_zeros(n)
    for _ in range(iterations):
        f = -epsilon * torch.logsumexp((g - c) / epsilon, 1)
        g = -epsilon * torch.logsumexp((f[:, None] - c) / epsilon, 0)
    return ((f[:, None] + g - c) / epsilon).exp()


# -- without entropy -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_without_entropy_it_is_the_best_of_all_permutations(n: int) -> None:
    for seed in range(5):
        x, y = normal(n, 3, seed=seed), normal(n, 3, seed=seed + 10)
        c = costs(x, y)
        least = min(sum(float(c[i, p[i]]) for i in range(n)) for p in itertools.permutations(range(n)))
        index = Permutation().best({"primal": moments(x, y)}).index
        weights = torch.full((n,), 1 / n, dtype=torch.float64).numpy()
        torch.testing.assert_close(c[range(n), index].sum().item(), least)
        torch.testing.assert_close(float(ot.emd2(weights, weights, c.numpy())) * n, least)
        torch.testing.assert_close((best(x, y, 1e-4) * c).sum().item(), least, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n", [17, 64])
def test_the_plan_of_least_cost_is_the_assignment(n: int) -> None:
    x, y = normal(n, 9), normal(n, 9, seed=1)
    weights = torch.full((n,), 1 / n, dtype=torch.float64).numpy()
    plan = n * torch.as_tensor(ot.emd(weights, weights, costs(x, y).numpy()))
    torch.testing.assert_close(plan, Permutation().best({"primal": moments(x, y)}).to_dense())


# -- with it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("regularisation", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("n", [2, 7, 23])
def test_as_written_out(n: int, regularisation: float) -> None:
    x, y = normal(n, 6), normal(n, 6, seed=1)
    c = costs(x, y)
    expected = written_out(c, regularisation * float(c.mean()), 2000)
    torch.testing.assert_close(best(x, y, regularisation), expected, rtol=1e-3, atol=1e-3)
    assert not torch.equal(expected.round(), expected)


def test_no_other_plan_has_less_cost_with_its_entropy() -> None:
    x, y = normal(6, 4), normal(6, 4, seed=1)
    c, found = costs(x, y), best(x, y, 0.1)
    epsilon = 0.1 * float(c.mean())

    def value(m: Tensor) -> float:
        return float((m * c).sum() + epsilon * torch.xlogy(m, m).sum())

    for seed in range(20):
        other = Sinkhorn().random(6, (), torch.Generator().manual_seed(seed)).matrix
        assert value(found) <= value(0.99 * found + 0.01 * other) + 1e-6
        assert value(found) < value(other)


@pytest.mark.parametrize("n", [5, 23, 64])
def test_towards_zero_the_assignment_and_towards_infinity_the_uniform_map(n: int) -> None:
    x, y, index = permuted(n, 0.3)
    planted = Monomial(index).to_dense()
    torch.testing.assert_close(best(x, y, 1e-3), planted, rtol=0, atol=1e-9)
    torch.testing.assert_close(best(x, y, 1e-12), planted, rtol=0, atol=1e-9)
    torch.testing.assert_close(best(x, y, 1e6), torch.full((n, n), 1 / n, dtype=torch.float64), rtol=1e-5, atol=0)
    entropies = [float(-torch.xlogy(m, m).sum()) for m in (best(x, y, r) for r in (1e-3, 0.1, 0.3, 1.0, 1e6))]
    assert entropies == sorted(entropies)


def test_units_that_have_nothing_in_common_are_assigned_too() -> None:
    """Where the prices of the assignment lie at a corner, as they always do for units of which none fits."""
    for seed in range(10):
        x, y = normal(9, 4, seed=seed), normal(9, 4, seed=seed + 100)
        c, hard = costs(x, y), Permutation().best({"primal": moments(x, y)}).to_dense()
        assert float((best(x, y, 1e-5) * c).sum() / (hard * c).sum()) < 1.001


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.floats(1e-6, 1e3), st.integers(0, 999))
def test_rows_and_columns_sum_to_one(n: int, regularisation: float, seed: int) -> None:
    m = best(normal(n, 4, seed=seed), normal(n, 4, seed=seed + 1), regularisation)
    ones = torch.ones(n, dtype=torch.float64)
    assert bool((m >= 0).all())
    torch.testing.assert_close(m.sum(0), ones)
    torch.testing.assert_close(m.sum(1), ones)
    assert Sinkhorn().contains(Coupling(m), 1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9), st.floats(0.02, 10), st.integers(0, 999))
def test_the_order_of_the_units_makes_no_difference(n: int, regularisation: float, seed: int) -> None:
    x, y = normal(n, 12, seed=seed), normal(n, 12, seed=seed + 1)
    rng = torch.Generator().manual_seed(seed)
    i, j = torch.randperm(n, generator=rng), torch.randperm(n, generator=rng)
    expected = best(x, y, regularisation)[i][:, j]
    torch.testing.assert_close(best(x[i], y[j], regularisation), expected, rtol=0, atol=1e-2)


def test_the_scale_of_the_features_makes_no_difference() -> None:
    x, y = normal(7, 5), normal(7, 5, seed=1)
    torch.testing.assert_close(best(1e-3 * x, 1e-3 * y, 0.1), best(x, y, 0.1), rtol=1e-6, atol=1e-9)


def test_equal_models_give_the_identity() -> None:
    x = normal(11, 8)
    torch.testing.assert_close(best(x, x, 1e-3), torch.eye(11, dtype=torch.float64), rtol=0, atol=1e-9)
    assert not torch.equal(best(x, x, 1.0).round(decimals=2), torch.eye(11, dtype=torch.float64))


def test_units_that_are_all_the_same_are_averaged() -> None:
    x = normal(1, 8).expand(4, 8)
    torch.testing.assert_close(best(x, x, 0.1), torch.full((4, 4), 0.25, dtype=torch.float64))


def test_each_of_a_batch_by_itself_and_all_parts_together() -> None:
    x, y = normal(2, 3, 5, 4), normal(2, 3, 5, 4, seed=1)
    found = Sinkhorn(0.1).best({"primal": moments(x, y), "plain": moments(y, x)}).matrix
    assert found.shape == (2, 3, 5, 5)
    both = [torch.cat(pair, -1) for pair in ((x, y), (y, x))]
    torch.testing.assert_close(found[1, 2], best(both[0][1, 2], both[1][1, 2], 0.1))


# -- elements --------------------------------------------------------------------------------------


def test_what_a_coupling_does() -> None:
    g, h = (Sinkhorn().random(5, (2,), torch.Generator().manual_seed(seed)) for seed in (0, 1))
    w = normal(2, 3, 5)
    torch.testing.assert_close(g.act(w, 2), torch.einsum("bij,bkj->bki", g.matrix, w))
    assert g.dual() is g.forget() is g
    torch.testing.assert_close((g @ h).act(w, 2), g.act(h.act(w, 2), 2))
    assert Sinkhorn().contains(g @ h, 1e-12)
    assert Sinkhorn().identity(5, (2,)).is_identity()
    assert not g.is_identity()
    x, y = normal(2, 5, 6), normal(2, 5, 6, seed=1)
    full = Moments(x @ y.mT, x.square().sum(-1), y @ y.mT)
    torch.testing.assert_close(objective(g, {"primal": full}), (x - g.matrix @ y).square().sum((-2, -1)))
    assert torch.equal(g.rebuild(g.tensors()).matrix, g.matrix)


def test_what_a_coupling_is_not() -> None:
    g = Sinkhorn().random(5, (), torch.Generator().manual_seed(0))
    with pytest.raises(SymmetryError, match="averages units"):
        g.inverse()
    with pytest.raises(SymmetryError, match="needs Y Yᵀ"):
        g.gain(torch.ones(5))
    assert not any(
        GROUPS[name].contains(g, 1e-3) for name in ("permutation", "signed-monomial", "orthogonal", "centred")
    )
    assert "sinkhorn" not in GROUPS
    assert "coupling" not in ELEMENTS
    assert not Sinkhorn().contains(Coupling(2 * g.matrix), 1e-6)
    assert not Sinkhorn().contains(Coupling(torch.eye(5) - 0.1 + 0.1 * torch.eye(5).flip(0)), 1e-6)
    assert not Sinkhorn().contains(Permutation().identity(5, ()), 1e-6)


def test_it_follows_and_is_followed_by_permutations_only() -> None:
    g, w = Sinkhorn().random(5, (), torch.Generator().manual_seed(0)), normal(5, 3)
    p = Monomial(torch.tensor([3, 1, 0, 4, 2]))
    torch.testing.assert_close(compose(g, p).act(w, 0), g.act(p.act(w, 0), 0))
    torch.testing.assert_close(compose(p, g).act(w, 0), p.act(g.act(w, 0), 0))
    torch.testing.assert_close(coupling(p).dual().act(w, 0), p.dual().act(w, 0))
    with pytest.raises(SymmetryError, match="permutations only"):
        compose(g, GROUPS["signed"].random(5, (), torch.Generator().manual_seed(1)))


# -- names and errors ------------------------------------------------------------------------------


def test_names() -> None:
    assert sinkhorn("sinkhorn") == Sinkhorn()
    assert sinkhorn("sinkhorn:0.2") == Sinkhorn(0.2)
    assert sinkhorn("permutation") is None
    for wrong in ("sinkhorn:", "sinkhorn:0", "sinkhorn:-1", "sinkhorn:inf", "sinkhorn:nan", "sinkhorn:much"):
        with pytest.raises(OptionError, match="at least 1e-09"):
            sinkhorn(wrong)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(OptionError, match=r"pip install 'symfuse\[ot\]'"):
        best(normal(3, 2), normal(3, 2, seed=1), 0.1)


def test_costs_that_are_not_finite() -> None:
    x = normal(3, 2)
    x[1, 0] = math.nan
    with pytest.raises(SymmetryError, match="costs of transport are not finite"):
        best(x, normal(3, 2), 0.1)
