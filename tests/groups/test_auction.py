"""The compiled auction finds an optimum and proves it, or says that it has not: against all permutations at small
sizes, against scipy at larger ones."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from symfuse import groups
from symfuse.errors import SymmetryError
from symfuse.groups import assignment, auction
from symfuse.groups.assignment import assign, assign_batch
from symfuse.groups.auction import proved, solve

Matrix = NDArray[Any]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Before any test: hypothesis has a deadline for each example."""
    for dtype in (np.float32, np.float64):
        solve(np.eye(2, dtype=dtype)[::-1].copy())


def value(scores: Matrix, p: Matrix) -> float:
    assert sorted(p.tolist()) == list(range(len(scores)))
    return float(scores[np.arange(len(p)), p].sum(dtype=np.float64))


def optimum(scores: Matrix) -> float:
    return value(scores, linear_sum_assignment(scores, maximize=True)[1])


def found(scores: Matrix) -> Matrix:
    p = solve(scores)
    assert p is not None
    return p


def unproved(scores: Matrix) -> Matrix:
    """What is found. A proof asks for more than the rounding of a sum where all that is taken is nearly zero."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auction, "proved", lambda *_: True)
        return found(scores)


def rounding(scores: Matrix) -> float:
    """What a sum of n scores may be off by."""
    return 1e-14 * len(scores) * float(np.abs(scores).max())


def draw(seed: int, n: int, kind: str) -> Matrix:
    random = np.random.default_rng(seed)
    normal = random.standard_normal((n, n))
    few = random.integers(-1, 2, (n, n)).astype(float)
    kinds = {
        "real": normal,
        "negative": -abs(normal) - 3,
        "ties": few,
        "tied rows": few[:, :1] + np.zeros((n, n)),
        "sums": few + few.T[:1],
        "spread": normal * 10.0 ** random.integers(-12, 12, (n, 1)),
        "near ties": few + 1e-9 * normal,
    }
    return kinds[kind]


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 7),
    kind=st.sampled_from(["real", "negative", "ties", "tied rows", "sums", "spread", "near ties"]),
    scale=st.sampled_from([1.0, 1e-20, 1e20]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_is_the_best_of_all_permutations(seed: int, n: int, kind: str, scale: float, dtype: type) -> None:
    scores = (scale * draw(seed, n, kind)).astype(dtype)
    every = np.array(list(itertools.permutations(range(n))))
    best = scores[np.arange(n), every].sum(-1, dtype=np.float64).max()
    assert abs(value(scores, unproved(scores)) - best) <= rounding(scores)


def features(n: int, *, shared: float, spread: float) -> Matrix:
    """X Yᵀ of two networks: directions in common with a falling spectrum, units of unequal norm."""
    random = np.random.default_rng(n)
    rank = n // 16
    directions = random.standard_normal((rank, n // 2)) / np.sqrt(np.arange(1, rank + 1))[:, None]
    sides = (
        (shared * random.standard_normal((n, rank)) @ directions + random.standard_normal((n, n // 2)))
        * np.exp(spread * random.standard_normal((n, 1)))
        for _ in "xy"
    )
    x, y = sides
    return x @ y.T


def planted(n: int, noise: float) -> Matrix:
    random = np.random.default_rng(n)
    x = random.standard_normal((n, n // 2))
    return x @ (x[random.permutation(n)] + noise * random.standard_normal(x.shape)).T


def random(n: int) -> np.random.Generator:
    return np.random.default_rng(n)


KINDS: dict[str, Callable[[int], Matrix]] = {
    "independent": lambda n: features(n, shared=0.0, spread=0.0),
    "correlated": lambda n: features(n, shared=3.0, spread=0.5),
    "fine-tune": lambda n: planted(n, 0.3),
    "far fine-tune": lambda n: planted(n, 6.0),
    "rank one": lambda n: np.outer(random(n).standard_normal(n), random(n + 1).standard_normal(n)),
    "products": lambda n: -np.outer(np.arange(1, n + 1), np.arange(1, n + 1)).astype(float),
    "0 to 100": lambda n: random(n).integers(0, 101, (n, n)).astype(float),
    "0 to 4": lambda n: random(n).integers(0, 5, (n, n)).astype(float),
    "0 and 1": lambda n: random(n).integers(0, 2, (n, n)).astype(float),
    "one 1": lambda n: np.eye(n)[random(n).permutation(n)] * (np.arange(n) % 3 == 0),
    "constant": lambda n: np.full((n, n), -2.5),
    "student": lambda n: random(n).standard_t(1.5, (n, n)),
    "dead units": lambda n: features(n, shared=3.0, spread=0.5) * (np.arange(n) > n // 3) * (np.arange(n) > 9)[:, None],
    "blocks": lambda n: np.kron(np.eye(4), random(n).standard_normal((n // 4, n // 4))),
    "steps": lambda n: np.maximum.outer(np.arange(n), np.arange(n)) ** 2.0,
    "huge": lambda n: 1e30 * features(n, shared=3.0, spread=0.5),
    "tiny": lambda n: 1e-30 * features(n, shared=3.0, spread=0.5),
}


@pytest.mark.parametrize("n", [300, pytest.param(900, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_reaches_the_optimum(kind: str, n: int) -> None:
    scores = KINDS[kind](n).astype(np.float32)
    before = scores.copy()
    assert abs(value(scores, found(scores)) - optimum(scores)) <= rounding(scores)
    assert np.array_equal(scores, before)


@pytest.mark.parametrize("n", [2, 23, 24, 25, 47, 48, 49, 95, 96, 97, 255, 256, 257, 511, 513])
def test_sizes_around_those_of_lists_and_parts(n: int) -> None:
    for scores in (random(n).standard_normal((n, n)), random(n).integers(0, 3, (n, n)).astype(float)):
        assert value(scores, found(scores)) == pytest.approx(optimum(scores), rel=1e-13)


def test_differences_far_below_the_scores() -> None:
    """In float32 all of these are alike."""
    small = np.round(1e6 * random(0).standard_normal((300, 300))) / 2**40
    scores = 1.0 + small
    assert np.array_equal(scores - 1.0, small)
    assert np.array_equal(found(scores), found(small))
    assert value(small, found(scores)) == pytest.approx(optimum(small), rel=1e-9)


@pytest.mark.parametrize("scale", [1e300, 1e307])
def test_what_overflows_is_found_or_given_up(scale: float) -> None:
    scores = scale * random(0).uniform(-1, 1, (200, 200))
    p = solve(scores, budget=50)
    assert p is None or np.array_equal(p, found(scores / scale))
    assert np.array_equal(assign(torch.from_numpy(scores)).numpy(), found(scores / scale))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 150))
def test_moves_with_rows_and_columns(seed: int, n: int) -> None:
    scores = draw(seed, n, "real")  # one optimum
    row, column = np.random.default_rng(seed).permuted(np.tile(np.arange(n), (2, 1)), axis=1)
    moved = np.ascontiguousarray(scores[row][:, column])
    assert np.array_equal(column[unproved(moved)], unproved(scores)[row])


class TestProof:
    """By weak duality prices bound the score of every permutation: none that is worse passes."""

    def test_the_optimum_passes_with_prices_that_prove_it(self) -> None:
        scores = planted(200, 0.3)
        p = scores.argmax(1).astype(np.int32)
        assert proved(scores, p, np.zeros(200))
        prices = random(1).standard_normal(200)
        assert proved(scores + prices, p, prices)

    def test_a_worse_permutation_does_not(self) -> None:
        scores = planted(200, 0.3)
        p = scores.argmax(1).astype(np.int32)
        p[[3, 7]] = p[[7, 3]]
        assert not proved(scores, p, np.zeros(200))

    def test_not_by_the_least_difference_that_scores_have(self) -> None:
        scores = np.zeros((200, 200), np.float32) + np.eye(200, dtype=np.float32)
        scores[0, 0] = np.nextafter(np.float32(1), np.float32(2))
        scores[0, 1] = scores[1, 0] = 1
        p = np.arange(200, dtype=np.int32)
        assert proved(scores, p, np.zeros(200))
        p[[0, 1]] = p[[1, 0]]
        assert not proved(scores, p, np.zeros(200))

    @pytest.mark.parametrize("wrong", [1e-9, -1e-9])
    def test_nor_prices_that_prove_nothing(self, wrong: float) -> None:
        scores = np.zeros((50, 50)) + np.eye(50) * [[1e-12]]
        prices = np.zeros(50)
        prices[4] += wrong
        assert not proved(scores + 1.0, np.arange(50, dtype=np.int32), prices)

    def test_nor_prices_beside_which_scores_are_lost(self) -> None:
        assert proved(np.eye(3), np.arange(3, dtype=np.int32), np.full(3, 1.0))
        assert not proved(np.eye(3), np.array([1, 2, 0], np.int32), np.full(3, 1e20))
        assert not proved(np.eye(3), np.arange(3, dtype=np.int32), np.full(3, 1e20))

    @pytest.mark.parametrize("column", [[0, 0, 2], [0, 1, -1], [1, 2, 3]])
    def test_nor_what_is_no_permutation(self, column: list[int]) -> None:
        assert not proved(np.zeros((3, 3)), np.array(column, np.int32), np.zeros(3))

    def test_nor_prices_that_are_not_finite(self) -> None:
        assert not proved(np.eye(3), np.arange(3, dtype=np.int32), np.array([0.0, np.nan, 0.0]))

    @given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 6))
    def test_no_prices_prove_what_is_not_the_best(self, seed: int, n: int) -> None:
        scores = draw(seed, n, "ties")
        prices = np.random.default_rng(seed).integers(-2, 3, n).astype(float)
        every = np.array(list(itertools.permutations(range(n))), np.int32)
        values = scores[np.arange(n), every].sum(-1)
        for p, reached in zip(every, values, strict=True):
            assert reached == values.max() or not proved(scores, p, prices)

    def test_a_solver_that_errs_gives_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(scores: Matrix, s: Any) -> None:
            s.column[:] = np.arange(len(scores))

        monkeypatch.setattr(auction, "_augment", wrong)
        assert solve(features(100, shared=0.0, spread=0.0)) is None


@pytest.mark.parametrize("kind", ["independent", "rank one", "products", "0 and 1"])
def test_beyond_its_budget_it_gives_up(kind: str) -> None:
    scores = KINDS[kind](200)
    assert solve(scores, budget=0.5) is None
    for budget in np.geomspace(0.5, 500, 12):
        p = solve(scores, budget=float(budget))
        assert p is None or value(scores, p) == pytest.approx(optimum(scores), rel=1e-13)
    assert p is not None


def test_what_it_holds_is_what_is_said() -> None:
    n = 5000
    state = auction._State.of(np.broadcast_to(np.float32(0), (n, n)), 1.0)
    paths = n * (2 * 8 + 3 * 2 * 4 + 1 + 4 + 8)  # of _augment
    assert sum(part.nbytes for part in state) + paths < groups.assignment.workspace(n)


class TestAssign:
    """`assign` by the auction."""

    @pytest.fixture(autouse=True)
    def _large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(assignment, "LARGE", 200)

    @pytest.fixture
    def _not_by_scipy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(assignment, "_paths", None)

    scores = torch.from_numpy(features(200, shared=3.0, spread=0.5))

    @pytest.mark.usefixtures("_not_by_scipy")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
    def test_every_dtype_and_layout(self, dtype: torch.dtype) -> None:
        scores = (self.scores / self.scores.abs().max()).to(dtype)
        for view in (scores, scores.T, torch.stack([scores, scores], -1)[..., 0], scores.clone().requires_grad_()):
            matrix = view.detach().double().numpy()
            assert value(matrix, assign(view).numpy()) == pytest.approx(optimum(matrix), rel=1e-13)

    @pytest.mark.usefixtures("_not_by_scipy")
    def test_batches(self) -> None:
        batch = torch.stack([self.scores, self.scores.T, torch.eye(200, dtype=torch.float64)])
        assert torch.equal(assign_batch(batch), torch.stack([assign(s) for s in batch]))

    def test_smaller_ones_do_not_load_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(assignment, "_solver", None)
        small = self.scores[:199, :199]
        assert assignment.workspace(199) == 9 * 199**2
        assert value(small.numpy(), assign(small).numpy()) == pytest.approx(optimum(small.numpy()), rel=1e-13)

    @pytest.mark.parametrize("outcome", [None, OSError("no space left for what is compiled")])
    def test_without_a_result_scipy_finds_one(self, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def fails(scores: Matrix) -> None:
            asked.append(len(scores))
            if outcome is not None:
                raise outcome

        monkeypatch.setattr(assignment, "_solver", lambda: fails)
        assert value(self.scores.numpy(), assign(self.scores).numpy()) == pytest.approx(optimum(self.scores.numpy()))
        assert asked == [200]

    @pytest.fixture(params=[ImportError("numba needs NumPy 2.4 or less"), OSError("no libllvm"), None], ids=str)
    def _without_numba(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """It is installed, and importing it fails; None: it is not installed."""

        class Finder:
            def find_spec(self, name: str, *_args: object) -> None:
                if name == "numba":
                    raise request.param

        monkeypatch.delitem(sys.modules, "numba")
        monkeypatch.delitem(sys.modules, "symfuse.groups.auction")
        monkeypatch.delattr(groups, "auction")
        if request.param is None:
            monkeypatch.setitem(sys.modules, "numba", None)
        else:
            monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        assignment._solver.cache_clear()
        with pytest.raises(Exception):  # noqa: B017, PT011
            from symfuse.groups import auction as _  # noqa: F401
        yield
        assignment._solver.cache_clear()

    @pytest.mark.usefixtures("_without_numba")
    def test_without_numba(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert value(self.scores.numpy(), assign(self.scores).numpy()) == pytest.approx(optimum(self.scores.numpy()))
        assert assignment.workspace(200) == 9 * 200**2
        monkeypatch.setattr(assignment, "MAX_SIZE", 199)
        with pytest.raises(SymmetryError, match=r"200 units .* 199 units"):
            assign(torch.eye(200))  # before anything is looked at

    @pytest.mark.parametrize("n", [200, 150, 300])
    def test_whole_numbers(self, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """In float32 all of these are alike. By the auction, and below it by scipy, without prices and with them."""
        monkeypatch.setattr(assignment, "LARGE", 200 if n == 200 else 1000)
        small = torch.from_numpy(random(0).integers(0, 100, (n, n)))
        assert value(small.numpy(), assign(small + 2**40).numpy()) == optimum(small.numpy())

    def test_the_limit_is_that_of_scipy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(assignment, "MAX_SIZE", 150)
        assert value(self.scores.numpy(), assign(self.scores).numpy()) == pytest.approx(optimum(self.scores.numpy()))
        with pytest.raises(SymmetryError, match=r"160 units .* 150 units"):
            assign(self.scores[:160, :160])
        monkeypatch.setattr(assignment, "_solver", lambda: lambda _: None)
        with pytest.raises(SymmetryError, match=r"200 units .* 150 units"):
            assign(self.scores)


def test_threads_do_not_disturb_each_other() -> None:
    matrices = [KINDS[kind](300).astype(np.float32) for kind in ("independent", "correlated", "rank one", "0 to 4")] * 2
    expected = [found(m) for m in matrices]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(np.array_equal, pool.map(found, matrices), expected))


def test_without_a_folder_to_keep_it_in_it_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(*, nogil: bool, cache: bool = False) -> Callable[[Any], Any]:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", nogil, function)

    monkeypatch.setattr(auction, "njit", njit)
    assert auction._compiled(len) == ("compiled", True, len)


@pytest.mark.slow
def test_threads_may_be_the_first_at_once_in_an_empty_folder(tmp_path: Path) -> None:
    code = """
import threading
import numpy as np
from symfuse.groups.auction import solve
matrices = [np.random.default_rng(k).standard_normal((200, 200)) for k in range(3)]
out = [None] * 3
def one(k): out[k] = solve(matrices[k])
threads = [threading.Thread(target=one, args=(k,)) for k in range(3)]
[t.start() for t in threads], [t.join() for t in threads]
assert all(np.array_equal(p, solve(m)) for p, m in zip(out, matrices)), out
print("alike")
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [run.communicate(timeout=240)[0] for run in runs] == ["alike\n"] * 2
    assert any(tmp_path.rglob("*.nbi"))
