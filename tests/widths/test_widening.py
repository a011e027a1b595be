"""The maps: dualᵀ primal is one, whatever the sizes; what goes there comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.widths import Duplication, Isometry, Widening
from symfuse.widths.maps import centred_basis, keeping_mean


def copies(n: int, m: int, rng: torch.Generator) -> Duplication:
    """Of every unit at least one, with random shares."""
    index = torch.cat([torch.arange(n), torch.randint(n, (m - n,), generator=rng)])[torch.randperm(m, generator=rng)]
    share = torch.rand(m, generator=rng, dtype=torch.float64) + 0.1
    sums = torch.zeros(n, dtype=torch.float64).scatter_add(0, index, share)
    return Duplication(n, index, share / sums[index])


def random(n: int, m: int, kind: str, seed: int) -> Widening:
    rng = torch.Generator().manual_seed(seed)
    if kind == "copies":
        return copies(n, m, rng)
    if kind == "even":
        return Duplication.even(n, m)
    if kind == "mean":
        basis = centred_basis(m)
        turn = torch.linalg.qr(torch.randn(m - 1, m - 1, generator=rng, dtype=torch.float64)).Q
        return Isometry.stream(keeping_mean((basis @ turn)[:, : n - 1]))
    return Isometry.stream(torch.linalg.qr(torch.randn(m, n, generator=rng, dtype=torch.float64)).Q)


def matrix(widening: Widening, n: int, part: str) -> Tensor:
    return widening.act(torch.eye(n, dtype=torch.float64), 0, part)  # type: ignore[arg-type]


sizes = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 3 * n)))
kinds = st.sampled_from(["copies", "even", "mean", "rotated"])


@settings(max_examples=40, deadline=None)
@given(sizes=sizes, kind=kinds, seed=st.integers(0, 99))
def test_what_is_read_stays(sizes: tuple[int, int], kind: str, seed: int) -> None:
    n, m = sizes
    widening = random(n, m, kind, seed)
    primal, dual = (matrix(widening, n, part) for part in ("primal", "dual"))
    torch.testing.assert_close(dual.mT @ primal, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)
    w = torch.randn(2, 3, n, 4, dtype=torch.float64)
    for part in ("primal", "dual", *(["plain"] if isinstance(widening, Duplication) else [])):
        there = widening.act(w, 2, part)  # type: ignore[arg-type]
        by_hand = torch.einsum("ij,abjc->abic", matrix(widening, n, part), w)
        torch.testing.assert_close(there, by_hand, rtol=0, atol=1e-12)
        torch.testing.assert_close(widening.back(there, 2, part), w, rtol=0, atol=1e-12)  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(sizes=sizes, kind=kinds, seed=st.integers(0, 99))
def test_what_a_norm_sees_stays(sizes: tuple[int, int], kind: str, seed: int) -> None:
    """The mean of squares; of LayerNorms also the mean, where it is kept, or all units have equally many copies."""
    n, m = sizes
    widening = random(n, m, kind, seed)
    if isinstance(widening, Duplication) and not widening.balanced:
        return
    x = torch.randn(n, 5, dtype=torch.float64)
    there = widening.act(x, 0, "primal")
    torch.testing.assert_close(there.square().mean(0), x.square().mean(0), rtol=1e-12, atol=1e-12)
    if kind != "rotated":
        centred = x - x.mean(0)
        there = widening.act(centred, 0, "primal")
        torch.testing.assert_close(there.mean(0), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)


def test_copies_for_each_element_of_a_batch() -> None:
    index = torch.tensor([[0, 1, 1], [1, 0, 0]])
    widening = Duplication.of(index, 2)
    w = torch.randn(2, 2, 5, dtype=torch.float64)
    for part in ("primal", "dual", "plain"):
        together = widening.act(w, 1, part)  # type: ignore[arg-type]
        apart = torch.stack([Duplication.of(index[i], 2).act(w[i], 0, part) for i in range(2)])  # type: ignore[arg-type]
        torch.testing.assert_close(together, apart, rtol=0, atol=0)
        torch.testing.assert_close(widening.back(together, 1, part), w, rtol=0, atol=1e-14)  # type: ignore[arg-type]


def test_what_is_no_such_map_is_refused() -> None:
    with pytest.raises(SymmetryError, match="not an isometry"):
        Isometry(torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(SymmetryError, match="can be copied, not rotated"):
        Isometry.padding(2, 3).act(torch.ones(2), 0, "plain")
    with pytest.raises(SymmetryError, match="there are units 0 to 1, and a copy is of unit 2"):
        Duplication(2, torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.float64))
