"""The assignment is optimal: against all permutations at small sizes, against scipy at real ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.groups import assignment
from symfuse.groups.assignment import _prices, assign, assign_batch

SEEDS = st.integers(0, 2**32 - 1)


def value(scores: Tensor, p: Tensor) -> float:
    """The score of a permutation in float64; fails if p is none."""
    assert p.dtype == torch.long
    assert sorted(p.tolist()) == list(range(len(scores)))
    return scores.double()[torch.arange(len(p)), p].sum().item()


def brute_force(scores: Tensor) -> float:
    """The naive reference: the best of all n! permutations."""
    n = len(scores)
    every = torch.tensor(list(itertools.permutations(range(n))), dtype=torch.long).reshape(-1, n)
    return scores.double()[torch.arange(n), every].sum(-1).max().item()


def optimum(scores: Tensor) -> float:
    rows, columns = linear_sum_assignment(scores.double().numpy(), maximize=True)
    return scores.double().numpy()[rows, columns].sum()


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def shuffle(seed: int, n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


@given(
    seed=SEEDS,
    n=st.integers(1, 7),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    sign=st.sampled_from(["real", "negative", "integer"]),
)
def test_is_the_best_of_all_permutations(seed: int, n: int, dtype: torch.dtype, sign: str) -> None:
    scores = normal(seed, n, n, dtype=dtype)
    scores = {"real": scores, "negative": -scores.abs(), "integer": (2 * scores).round()}[sign]
    assert value(scores, assign(scores)) == pytest.approx(brute_force(scores), rel=1e-12, abs=1e-12)


@given(seed=SEEDS, n=st.integers(2, 40))
def test_moves_with_rows_and_columns(seed: int, n: int) -> None:
    scores, row, column = normal(seed, n, n), shuffle(seed, n), shuffle(seed + 1, n)
    moved = scores[row][:, column]
    assert torch.equal(column[assign(moved)], assign(scores)[row])  # Gaussian: one optimum


@given(seed=SEEDS, n=st.integers(2, 40))
def test_constants_on_rows_and_columns_do_not_matter(seed: int, n: int) -> None:
    scores = normal(seed, n, n)
    shifted = scores + 3 * normal(seed + 1, n, 1) + 3 * normal(seed + 2, 1, n)
    assert torch.equal(assign(shifted), assign(scores))


@given(seed=SEEDS, n=st.integers(1, 40), largest=st.integers(0, 4))
def test_ties_reach_the_optimum(seed: int, n: int, largest: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-largest, largest + 1, (n, n), generator=generator).float()
    assert value(scores, assign(scores)) == optimum(scores)
    assert torch.equal(assign(scores), assign(scores))


def gram(n: int, shared: float, spread: float) -> Tensor:
    """X Yᵀ of two networks: directions in common with a falling spectrum, units of unequal norm."""
    width, rank = n // 2 + 1, n // 16
    directions = normal(0, rank, width) * torch.arange(1, rank + 1).rsqrt()[:, None]
    x, y = (
        (shared * normal(s, n, rank) @ directions + normal(s + 1, n, width)) * (spread * normal(s + 2, n, 1)).exp()
        for s in (1, 4)
    )
    return x @ y.T


def planted(n: int, noise: float) -> Tensor:
    x = normal(0, n, n // 2)
    return x @ (x[shuffle(1, n)] + noise * normal(2, n, n // 2)).T


REAL_SIZES = {
    "independent": gram(300, 0.0, 0.0),
    "correlated": gram(300, 3.0, 0.5),
    "fine-tune": planted(300, 0.3),
    "far fine-tune": planted(300, 4.0),
    "rank one": torch.outer(normal(0, 300), normal(1, 300)),
    "heavy tails": normal(0, 300, 300) / normal(1, 300, 300),
    "dead units": gram(300, 3.0, 0.5) * (torch.arange(300) > 30) * (torch.arange(300) > 40)[:, None],
    "ties": (2 * normal(0, 300, 300)).round(),
    "constant": torch.full((300, 300), -2.5, dtype=torch.float64),
    "huge": 1e30 * gram(300, 3.0, 0.5),
    "tiny": 1e-30 * gram(300, 3.0, 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", REAL_SIZES)
def test_started_warm_it_reaches_the_optimum(name: str, dtype: torch.dtype) -> None:
    scores = REAL_SIZES[name].to(dtype)
    before = scores.clone()
    assert value(scores, assign(scores)) == pytest.approx(optimum(scores), rel=1e-12)
    assert torch.equal(scores, before)


def test_prices_are_worth_their_time() -> None:
    """The bound they prove, Σ maxⱼ (s − v) + Σ v, closes nearly all of the gap that row maxima leave."""
    scores = REAL_SIZES["correlated"].float()
    prices, best = _prices(scores), optimum(scores)
    bound = ((scores - prices).amax(1).sum() + prices.sum()).item()
    assert best <= bound * (1 + 1e-6)
    assert bound - best < 0.02 * (scores.amax(1).sum().item() - best)


def test_prices_are_binary_fractions() -> None:
    """So that tied scores stay tied: where each column has its own error, scipy takes 50 times longer."""
    scaled = 1024 * _prices(REAL_SIZES["ties"].float())
    assert scaled.any()
    assert torch.equal(scaled, scaled.round())


@pytest.mark.parametrize("scale", [1e60, 1e-60])
def test_scores_beyond_float32(scale: float) -> None:
    scores = scale * REAL_SIZES["correlated"]
    assert value(scores, assign(scores)) == pytest.approx(optimum(scores), rel=1e-12)


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_distinct_maxima_are_read_off(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted permutation; rescaled units on one side hide it from the maxima of the other side alone."""
    scores = planted(100, 0.1) * normal(3, 100).exp()
    assert sorted(scores.argmax(0).tolist()) == list(range(100))
    assert len(scores.argmax(1).unique()) < 100
    monkeypatch.setattr("symfuse.groups.assignment._paths", None)  # must not be called
    if side == "rows":
        assert torch.equal(assign(scores.T), scores.argmax(0))
    else:
        assert torch.equal(assign(scores), scores.argmax(0).argsort())


def test_a_row_that_holds_no_column_maximum_is_not_read_as_one_that_does() -> None:
    scores = torch.tensor([[1.0, 9.0, 8.0], [0.0, 5.0, 7.0], [6.0, 4.0, 3.0]])
    tied = torch.tensor([[0.0, 9.0, 9.0], [0.0, 8.0, 1.0], [0.0, 9.0, 9.0]])
    for s in (scores, tied, tied.T):
        assert value(s, assign(s)) == brute_force(s)


@settings(max_examples=20)
@given(seed=SEEDS, n=st.integers(1, 9))
def test_a_batch_is_its_matrices(seed: int, n: int) -> None:
    scores = normal(seed, 3, 2, n, n)
    expected = torch.stack([assign(s) for s in scores.reshape(6, n, n)]).reshape(3, 2, n)
    assert torch.equal(assign_batch(scores), expected)


@pytest.mark.parametrize("shape", [(0, 0), (1, 1)])
def test_sizes_without_a_choice(shape: tuple[int, int]) -> None:
    assert torch.equal(assign(torch.zeros(shape)), torch.arange(shape[0]))


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 0)])
def test_empty_batches(shape: tuple[int, ...]) -> None:
    assert assign_batch(torch.zeros(shape)).shape == shape[:-1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_scores_that_are_not_finite(bad: float) -> None:
    scores = torch.zeros(5, 5)
    scores[1, 2] = scores[3, 3] = bad
    with pytest.raises(SymmetryError, match=r"^2 of 25 matching scores are not finite"):
        assign(scores)


def test_refuses_what_is_too_large_for_scipy_before_taking_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "_solver", lambda: None)
    n = assignment.MAX_SIZE + 1
    with pytest.raises(
        SymmetryError, match=rf"{n} units by scipy needs about 18 GiB .* {n - 1} units.*symfuse\[fast\]"
    ):
        assign(torch.zeros(()).expand(n, n))


def test_gradients_are_not_followed() -> None:
    scores = normal(0, 5, 5).requires_grad_()
    assert not assign(scores).requires_grad
