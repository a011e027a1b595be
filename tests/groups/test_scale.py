"""The best scale of a pair, in closed form, against a search that knows nothing of quartics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symfuse.groups.scale import LIMIT, best_scale, least_cost, scale_cost

LOGS = torch.linspace(-1, 1, 4001, dtype=torch.float64) * torch.log(torch.tensor(LIMIT, dtype=torch.float64))


def by_search(p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """The least cost on a dense grid of logarithms, polished by golden sections about its lowest point."""
    cost = scale_cost(LOGS.exp(), *(t[..., None] for t in (p, q, r, s)))
    at = cost.argmin(-1)
    low, high = LOGS[(at - 1).clamp_min(0)], LOGS[(at + 1).clamp_max(len(LOGS) - 1)]
    for _ in range(60):
        left, right = high - 0.618034 * (high - low), low + 0.618034 * (high - low)
        falls = scale_cost(left.exp(), p, q, r, s) < scale_cost(right.exp(), p, q, r, s)
        low, high = torch.where(falls, low, left), torch.where(falls, right, high)
    return torch.minimum(cost.amin(-1), scale_cost(((low + high) / 2).exp(), p, q, r, s))


def assert_is_minimum(p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> None:
    a = best_scale(p, q, r, s)
    assert a.dtype == torch.float64
    assert a.isfinite().all()
    assert ((a >= 1 / LIMIT) & (a <= LIMIT)).all()
    # Relative to the size of the terms at the minimum: they may cancel.
    size = p * a**2 + 2 * q.abs() * a + r / a**2 + 2 * s.abs() / a
    excess = scale_cost(a, p, q, r, s) - by_search(p, q, r, s)
    assert (excess <= 1e-12 * size).all(), (excess / size).max()
    assert (scale_cost(a, p, q, r, s) <= scale_cost(torch.ones_like(a), p, q, r, s)).all()


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def terms(x: Tensor, y: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    """|y|² and ⟨x, y⟩ from the norms and the cosine."""
    return y**2, cos * x * y


# Many pairs an example: the search is one batch.
norms = st.lists(st.one_of(st.just(0.0), st.floats(-3, 3).map(lambda e: 10.0**e)), min_size=8, max_size=8)
wide_norms = st.lists(st.one_of(st.just(0.0), st.floats(-140, 140).map(lambda e: 10.0**e)), min_size=8, max_size=8)
cosines = st.lists(st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1, 1)), min_size=8, max_size=8)


@settings(max_examples=60, deadline=None)
@given(norms, norms, cosines, norms, norms, cosines)
def test_no_scale_is_better(
    x: list[float], y: list[float], c: list[float], x2: list[float], y2: list[float], c2: list[float]
) -> None:
    assert_is_minimum(*terms(vector(x), vector(y), vector(c)), *terms(vector(x2), vector(y2), vector(c2)))


@pytest.mark.parametrize("spread", [3, 10, 20, 60, 140])
def test_no_scale_is_better_in_a_thousand_random_pairs(spread: int) -> None:
    """Norms of all four sides log-uniform over 10^±spread, all signs of the two inner products."""
    rng = torch.Generator().manual_seed(spread)
    x, y, x2, y2 = 10.0 ** (spread * (2 * torch.rand(4, 1000, generator=rng, dtype=torch.float64) - 1))
    c, c2 = 2 * torch.rand(2, 1000, generator=rng, dtype=torch.float64) - 1
    assert_is_minimum(*terms(x, y, c), *terms(x2, y2, c2))


def test_an_anchor_that_dwarfs_the_source_and_opposes_it() -> None:
    """Where |y|² and |y'|² vanish beside both inner products, the minimum is where these balance: √(s/q)."""
    tiny, ratio = vector([1e-30]), vector([2.0])
    a = best_scale(tiny**2, -tiny, tiny**2, -(ratio**2) * tiny)
    torch.testing.assert_close(a, ratio, rtol=1e-9, atol=0)
    assert_is_minimum(tiny**2, -tiny, tiny**2, -(ratio**2) * tiny)


@settings(max_examples=60, deadline=None)
@given(wide_norms, wide_norms, cosines, wide_norms, wide_norms, cosines)
def test_no_scale_is_better_whatever_the_ratios(
    x: list[float], y: list[float], c: list[float], x2: list[float], y2: list[float], c2: list[float]
) -> None:
    """Neurons that training has all but switched off: norms that differ by a hundred orders of magnitude."""
    assert_is_minimum(*terms(vector(x), vector(y), vector(c)), *terms(vector(x2), vector(y2), vector(c2)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-2.5, 2.5), st.floats(0, 2), st.floats(0, 2)), min_size=8, max_size=8))
def test_of_two_minima_the_lower_is_taken(places: list[tuple[float, float, float]]) -> None:
    """Quartics with three positive roots u ≤ v ≤ w; the fourth, t, is such that there is no square term."""
    u = torch.exp(vector([e for e, _, _ in places]))
    v = u * torch.exp(vector([e for _, e, _ in places]))
    w = v * torch.exp(vector([e for _, _, e in places]))
    t = -(u * v + u * w + v * w) / (u + v + w)
    q = u + v + w + t
    s = -(u * v * w + t * (u * v + u * w + v * w))
    r = -u * v * w * t
    one = torch.ones_like(u)
    assert_is_minimum(one, q, r, s)
    found = best_scale(one, q, r, s)
    nearest = torch.minimum((found - u).abs(), (found - w).abs())
    apart = (v > 1.1 * u) & (w > 1.1 * v)
    assert (nearest[apart] <= 1e-6 * w[apart]).all(), "a minimum is an outer root"


def test_both_minima_occur_and_are_told_apart() -> None:
    """(a − 1)(a − 2)(a − w)(a + t): the lower minimum is 1 for a near w and w for a far one, never 2."""
    w = vector([2.2, 10.0])
    t = (2 + 3 * w) / (3 + w)
    q, r, s = 3 + w - t, 2 * w * t, t * (2 + 3 * w) - 2 * w
    torch.testing.assert_close(best_scale(torch.ones_like(w), q, r, s), vector([1.0, 10.0]))


@pytest.mark.parametrize("side", ["primal", "dual"])
@pytest.mark.parametrize("factor", [0.25, 1.0, 7.0])
def test_one_side_alone_gives_the_ratio(side: str, factor: float) -> None:
    zero, y = vector([0.0]), vector([3.0])
    if side == "primal":
        a = best_scale(y**2, factor * y**2, zero, zero)
        torch.testing.assert_close(a, vector([factor]), rtol=1e-12, atol=0)
    else:
        a = best_scale(zero, zero, y**2, factor * y**2)
        torch.testing.assert_close(a, vector([1 / factor]), rtol=1e-12, atol=0)


@settings(max_examples=50, deadline=None)
@given(st.floats(-6.5, 6.5), st.floats(-20, 20), st.floats(-20, 20))
def test_a_planted_scale_comes_back(log_scale: float, log_y: float, log_y2: float) -> None:
    a, p, r = (torch.exp(vector([e])) for e in (log_scale, log_y, log_y2))
    # So near to 1 that the cost of 1 is the same to the last digit, 1 it is.
    rtol = 1e-10 if abs(log_scale) > 1e-7 else 1e-7
    torch.testing.assert_close(best_scale(p, a * p, r, r / a), a, rtol=rtol, atol=0)


def test_nothing_to_go_by_leaves_the_scale() -> None:
    zero = vector([0.0])
    assert best_scale(zero, zero, zero, zero).item() == 1.0


def test_opposed_pairs_run_into_the_limits() -> None:
    one, zero = vector([1.0]), vector([0.0])
    assert best_scale(one, -one, zero, zero).item() == 1 / LIMIT
    assert best_scale(zero, zero, one, -one).item() == LIMIT


def test_batches_of_any_shape_and_lower_precision_are_taken() -> None:
    rng = torch.Generator().manual_seed(0)
    y, y2 = torch.rand(2, 3, 5, generator=rng), torch.rand(2, 3, 5, generator=rng)
    a = best_scale(y, y, y2, -y2)
    assert a.shape == (2, 3, 5)
    assert a.dtype == torch.float64
    each = [best_scale(*row) for row in zip(y.view(-1), y.view(-1), y2.view(-1), -y2.view(-1), strict=True)]
    assert torch.equal(a.view(-1), torch.stack(each))


@pytest.mark.parametrize("ratio", [1.0, 4.0, 30.0, 1000.0])
@pytest.mark.parametrize("width", [4, 64])
def test_the_quick_cost_is_that_of_the_best_scale(ratio: float, width: int) -> None:
    """Over all pairs of related, unrelated and dead units, whatever the balance of the two sides."""
    rng = torch.Generator().manual_seed(width)
    x, y, x2, y2 = (torch.randn(60, width, generator=rng, dtype=torch.float64) for _ in range(4))
    y, y2 = ratio * torch.cat([x[:20] + 0.1 * y[:20], y[20:]]), torch.cat([x2[:20], y2[20:]])
    y2[-1] = 0
    p, q = (y * y).sum(1).expand(60, 60), x @ y.T
    r, s = (y2 * y2).sum(1).expand(60, 60), x2 @ y2.T
    expected = scale_cost(best_scale(p, q, r, s), p, q, r, s)
    assert ((least_cost(p, q, r, s) - expected).abs() <= 1e-9 * (expected.abs() + p + r)).all()
