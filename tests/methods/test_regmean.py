"""RegMean: against its formula, against least squares on the data, and the traps of published code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from symfuse.errors import IncompatibleError, OptionError
from symfuse.merging import Source, Stream
from symfuse.methods import lookup
from symfuse.methods.regmean import regmean
from symfuse.stats.statistics import Input, Statistics


def draw(count: int, *shape: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(count)]


def correlated(count: int, positions: int, inputs: int, seed: int = 0) -> list[Tensor]:
    """Inputs of each model, mixed in another way for each."""
    mixes = draw(count, inputs, inputs, seed=seed + 1)
    return [x @ m for x, m in zip(draw(count, positions, inputs, seed=seed), mixes, strict=True)]


def stats(x: Tensor, dim: int = 1) -> Statistics:
    """The statistics of a weight "w" that reads x, [positions, inputs]."""
    return Statistics("gram", {"w.gram": x.T @ x, "w.sum": x.sum(0)}, 1, inputs={"w": Input("w", dim, len(x))})


def merge(weights: Sequence[Tensor], statistics: Sequence[Statistics | None], **options: Any) -> Tensor:
    known = [None if one is None else one.of("w") for one in statistics]
    dtype, options = weights[0].dtype, {"weight": [1.0] * len(weights), **options}
    stream = Stream("w", weights[0].shape, [Source.of(w) for w in weights], dtype=dtype, block=11, statistics=known)
    return torch.cat([b.reshape(-1) for b in lookup("regmean")(stream, options)]).reshape(weights[0].shape)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9), st.integers(1, 7), st.floats(0, 1), st.booleans())
def test_the_formula_written_out(
    seed: int, count: int, inputs: int, outputs: int, alpha: float, transposed: bool
) -> None:
    dim = int(transposed)
    weights = draw(count, inputs, outputs, seed=seed)
    grams = [x.T @ x for x in correlated(count, inputs + 5, inputs, seed)]
    shares = [1.0 + i for i in range(count)]
    shrunk = [alpha * g + (1 - alpha) * torch.diag(torch.diag(g)) for g in grams]
    left = sum(c * g for c, g in zip(shares, shrunk, strict=True))
    right = sum(c * g @ w for c, g, w in zip(shares, shrunk, weights, strict=True))
    stored = [w if dim == 0 else w.T for w in weights]
    try:
        found = regmean(stored, grams, dim=dim, shares=shares, alpha=alpha, ridge=0.0)
    except OptionError:
        assert torch.linalg.cond(left) > 1e8
        return
    expected = torch.linalg.solve(left, right)
    assert_close(found if dim == 0 else found.T, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


def test_least_squares_on_all_data() -> None:
    """With all correlations the closed form minimises Σ |Xᵢ W - Xᵢ Wᵢ|²."""
    weights, data = draw(3, 6, 4), correlated(3, 40, 6)
    grams = [x.T @ x for x in data]
    stacked, wanted = torch.cat(data), torch.cat([x @ w for x, w in zip(data, weights, strict=True)])
    expected = torch.linalg.lstsq(stacked, wanted).solution
    for ridge, tolerance in ((0.0, 1e-9), (1e-10, 1e-6)):
        found = regmean(weights, grams, dim=0, shares=[1.0, 1.0, 1.0], alpha=1.0, ridge=ridge)
        assert_close(found, expected, rtol=tolerance, atol=tolerance)
    average = sum(weights[1:], weights[0]) / 3
    assert (stacked @ average - wanted).norm() > 1.1 * (stacked @ expected - wanted).norm()
    weighted = torch.cat([c**0.5 * x for c, x in zip((1, 2, 5), data, strict=True)])
    wanted = torch.cat([c**0.5 * x @ w for c, x, w in zip((1, 2, 5), data, weights, strict=True)])
    found = regmean(weights, grams, dim=0, shares=[1.0, 2.0, 5.0], alpha=1.0, ridge=0.0)
    assert_close(found, torch.linalg.lstsq(weighted, wanted).solution, rtol=1e-9, atol=1e-9)


def test_the_ridge_by_its_formula() -> None:
    """λ is added on both sides, so that it pulls to the average and not to zero."""
    weights, data = draw(2, 6, 4), correlated(2, 40, 6)
    grams, lam = [x.T @ x for x in data], 0.0
    lam = 0.3 * sum(0.5 * g.trace().item() for g in grams) / 6
    ridged = [0.9 * g + 0.1 * torch.diag(torch.diag(g)) + lam * torch.eye(6, dtype=torch.float64) for g in grams]
    expected = torch.linalg.solve(sum(ridged), sum(g @ w for g, w in zip(ridged, weights, strict=True)))
    assert_close(regmean(weights, grams, dim=0, shares=[1.0, 1.0], ridge=0.3), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_method_is_the_function_on_means_per_token(dim: int) -> None:
    weights = [w if dim == 0 else w.T.contiguous() for w in draw(2, 6, 4)]
    few, many = correlated(2, 40, 6)
    many = many.repeat(100, 1)
    statistics = [stats(few, dim), stats(many, dim)]
    grams = [few.T @ few / 40, many.T @ many / 4000]
    expected = regmean(weights, grams, dim=dim, shares=[1.0, 3.0])
    assert_close(merge(weights, statistics, weight=[1.0, 3.0]), expected, rtol=1e-12, atol=1e-12)
    by_data = regmean(weights, [g * n for g, n in zip(grams, (40, 4000), strict=True)], dim=dim, shares=[1.0, 3.0])
    assert_close(merge(weights, statistics, weight=[1.0, 3.0], per_token=False), by_data, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(by_data, expected, rtol=1e-2)
    narrow = merge([w.float() for w in weights], statistics, weight=[1.0, 3.0])
    assert narrow.dtype == torch.float32
    assert_close(narrow.double(), expected, rtol=1e-5, atol=1e-5)


def test_gram_matrices_reach_the_merge() -> None:
    """Trap of published code, in which they do not: the result then is the average."""
    weights, data = draw(2, 4, 6), correlated(2, 40, 6)
    average = (weights[0] + weights[1]) / 2
    found = merge(weights, [stats(x) for x in data])
    assert (found - average).norm() > 0.1 * average.norm()
    swapped = merge(weights, [stats(x) for x in reversed(data)])
    assert (found - swapped).norm() > 0.1 * average.norm()


@pytest.mark.parametrize("known", [(False, False), (True, False)])
def test_what_has_no_gram_matrix_is_averaged_as_linear_does(known: tuple[bool, bool]) -> None:
    weights, data = draw(2, 4, 6), correlated(2, 40, 6)
    statistics = [stats(x) if given else None for x, given in zip(data, known, strict=True)]
    stream = Stream("w", (4, 6), [Source.of(w) for w in weights], dtype=torch.float64, block=11)
    expected = torch.cat(list(lookup("linear")(stream, {"weight": [1.0, 3.0]})))
    assert torch.equal(merge(weights, statistics, weight=[1.0, 3.0]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_that_agree_stay_as_they_are(dtype: torch.dtype) -> None:
    (weight,), data = draw(1, 4, 6), correlated(3, 40, 6)
    weight = weight.to(dtype)
    assert torch.equal(merge([weight], [stats(data[0])], weight=[0.3]), weight)
    assert torch.equal(merge([weight] * 3, [stats(x) for x in data], weight=[1.0, 2.0, 4.0]), weight)
    once = [stats(x[:1]) for x in data]  # singular, and there is nothing to solve
    assert torch.equal(merge([weight] * 3, once, alpha=1.0, ridge=0.0), weight)


def test_inputs_that_never_occur_get_the_average() -> None:
    weights, data = draw(2, 4, 6), correlated(2, 40, 6)
    for x in data:
        x[:, [1, 4]] = 0
    found = merge(weights, [stats(x) for x in data], weight=[1.0, 3.0])
    average = weights[0] + 0.75 * (weights[1] - weights[0])
    assert torch.equal(found[:, [1, 4]], average[:, [1, 4]])
    assert (found - average)[:, [0, 2, 3, 5]].abs().min() > 0
    nothing = merge(weights, [stats(0 * x) for x in data], weight=[1.0, 3.0])
    assert torch.equal(nothing, average)
    with pytest.raises(OptionError, match=r"of the Gram matrices of its inputs is singular.*set a larger ridge"):
        merge(weights, [stats(x) for x in data], ridge=0.0)


def test_one_position_gives_a_finite_result() -> None:
    """Case C79. Of one position each nothing is known but two directions; elsewhere models are averaged."""
    weights, data = draw(2, 4, 6), correlated(2, 1, 6)
    for alpha in (0.9, 1.0):
        found = merge(weights, [stats(x) for x in data], alpha=alpha)
        assert bool(found.isfinite().all())
        assert found.abs().max() < 10 * max(w.abs().max() for w in weights)
    for x, w in zip(data, weights, strict=True):  # what each does on its own position is kept
        assert_close(x @ found.T, x @ w.T, rtol=1e-3, atol=1e-3)
    across = torch.linalg.svd(torch.cat(data))[2][2:]
    assert_close(across @ found.T, across @ (weights[0] + weights[1]).T / 2, rtol=1e-3, atol=1e-3)
    with pytest.raises(OptionError, match="inputs is singular"):
        merge(weights, [stats(x) for x in data], alpha=1.0, ridge=0.0)


def test_inputs_of_very_different_sizes_are_not_singular() -> None:
    weights, data = draw(2, 4, 6), correlated(2, 40, 6)
    scale = torch.logspace(-5, 5, 6, dtype=torch.float64)
    found = merge([w / scale for w in weights], [stats(x * scale) for x in data], ridge=0.0)
    assert_close(found * scale, merge(weights, [stats(x) for x in data], ridge=0.0), rtol=1e-7, atol=1e-7)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_it_does_not_depend_on_the_basis_of_the_inputs(seed: int) -> None:
    """With all correlations; a shrunk Gram matrix does depend on it."""
    weights, data = draw(2, 6, 4, seed=seed), correlated(2, 40, 6, seed)
    (basis,) = draw(1, 6, 6, seed=seed + 7)
    basis = basis + 3 * torch.eye(6, dtype=torch.float64)
    inside = torch.linalg.inv(basis).T
    grams = [x.T @ x for x in data]
    found = regmean(weights, grams, dim=0, shares=[1.0, 1.0], alpha=1.0, ridge=0.0)
    weights, grams = [inside @ w for w in weights], [basis @ g @ basis.T for g in grams]
    moved = [regmean(weights, grams, dim=0, shares=[1.0, 1.0], alpha=alpha, ridge=0.0) for alpha in (1.0, 0.5)]
    assert_close(moved[0], inside @ found, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(moved[1], inside @ found, rtol=1e-3)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0, 6), ()], ids=str)
def test_what_is_no_matrix_is_averaged(shape: tuple[int, ...]) -> None:
    a, b = draw(2, *shape)
    x = correlated(1, 9, 6)[0]
    assert_close(merge([a, b], [stats(x), stats(x)]), (a + b) / 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight": [1.0, -0.5]}, "needs weights of at least 0"),
        ({"weight": [0.0, 0.0]}, "sum to zero"),
        ({"alpha": 1.5}, "expected alpha from 0 to 1"),
        ({"ridge": -1.0}, "ridge at least 0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    weights, data = draw(2, 4, 6), correlated(2, 40, 6)
    with pytest.raises(OptionError, match=words):
        merge(weights, [stats(x) for x in data], **options)


def test_statistics_of_another_model() -> None:
    weights, data = draw(2, 4, 6), correlated(2, 40, 6)
    with pytest.raises(IncompatibleError, match=r"w is \[4, 6\], and a Gram matrix of its inputs \[6, 6\]"):
        merge(weights, [stats(data[0]), stats(data[1], 0)])
    with pytest.raises(IncompatibleError, match=r"a Gram matrix of its inputs \[5, 5\]"):
        merge(weights, [stats(x[:, :5]) for x in data])
    fisher = Statistics("fisher", {"w": weights[0].square()}, 1)
    with pytest.raises(OptionError, match="fisher statistics, which have no 'gram'"):
        merge(weights, [fisher, fisher])


def test_statistics_are_left_as_they_are() -> None:
    weights, data = draw(2, 4, 6), correlated(2, 40, 6)
    statistics = [stats(x) for x in data]
    before = [one.read("w.gram").clone() for one in statistics]
    merge(weights, statistics)
    assert all(torch.equal(one.read("w.gram"), old) for one, old in zip(statistics, before, strict=True))
