"""Methods of singular vectors: against their formulas, and what holds of them whatever the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from symfuse.errors import OptionError
from symfuse.merging import Source, Stream
from symfuse.merging.stream import BLOCK
from symfuse.methods import lookup

NAMES = ["tsv", "iso_c", "iso_cts"]


def merge(name: str, tensors: Sequence[Tensor], base: Tensor, block: int = BLOCK, **given: Any) -> Tensor:
    sources = [Source.of(t) for t in tensors]
    stream = Stream("w", base.shape, sources, Source.of(base), dtype=base.dtype, block=block)
    return torch.cat([part.reshape(-1) for part in lookup(name)(stream, given)]).reshape(base.shape)


def draw(shape: Sequence[int], count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for _ in range(count)]


def whitened(matrix: Tensor) -> Tensor:
    """M (MᵀM)^(-1/2): the polar factor by eigenvalues, where the implementation has singular vectors."""
    values, vectors = torch.linalg.eigh(matrix.T @ matrix)
    return matrix @ (vectors * values.rsqrt()) @ vectors.T


@pytest.mark.parametrize("shape", [(8, 13), (13, 8)], ids=str)
def test_tsv_by_its_formula(shape: tuple[int, int]) -> None:
    *tensors, base = draw(shape, 4)
    left, values, right = [], [], []
    for t in tensors:  # of rank 8, 8 // 3 = 2 directions each
        u, s, vh = torch.linalg.svd(t - base, full_matrices=False)
        left.append(u[:, :2])
        values.append(s[:2])
        right.append(vh[:2].T)
    product = whitened(torch.cat(left, 1)) @ torch.diag(torch.cat(values)) @ whitened(torch.cat(right, 1)).T
    assert_close(merge("tsv", tensors, base, **{"lambda": 0.7}), base + 0.7 * product, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(8, 13), (13, 8)], ids=str)
def test_iso_c_by_its_formula(shape: tuple[int, int]) -> None:
    *tensors, base = draw(shape, 4)
    u, s, vh = torch.linalg.svd(sum(t - base for t in tensors), full_matrices=False)
    expected = base + 0.7 * s.mean() * u @ vh
    assert_close(merge("iso_c", tensors, base, **{"lambda": 0.7}), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(10, 13), (13, 10)], ids=str)
def test_iso_cts_by_its_formula(shape: tuple[int, int]) -> None:
    *tensors, base = draw(shape, 3)
    deltas = [t - base for t in tensors]
    u, s, vh = torch.linalg.svd(sum(deltas), full_matrices=False)
    left, values, right = [u[:, :6]], [s[:6]], [vh[:6].T]  # 10 directions: 6 common, 2 for each of 2 tasks
    for delta in deltas:
        u_task, s_task, vh_task = torch.linalg.svd(delta - u[:, :6] @ u[:, :6].T @ delta, full_matrices=False)
        left.append(u_task[:, :2])
        values.append(s_task[:2])
        right.append(vh_task[:2].T)
    product = torch.cat(values).mean() * whitened(torch.cat(left, 1)) @ whitened(torch.cat(right, 1)).T
    found = merge("iso_cts", tensors, base, common_fraction=0.6)
    assert_close(found, base + product, rtol=1e-10, atol=1e-10)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(4, 6), (6, 4), (5, 5)]), st.integers(1, 3))
def test_iso_is_isotropic(seed: int, shape: tuple[int, int], count: int) -> None:
    *tensors, base = draw(shape, count + 1, seed)
    for name in ("iso_c", "iso_cts"):
        values = torch.linalg.svdvals(merge(name, tensors, base) - base)
        assert values[0] > 0.1
        assert_close(values, values[:1].expand_as(values), rtol=1e-8, atol=1e-8)


def test_iso_cts_with_nothing_for_the_tasks_is_iso_c() -> None:
    *tensors, base = draw((8, 13), 4)
    expected = merge("iso_c", tensors, base)
    assert_close(merge("iso_cts", tensors, base, common_fraction=1.0), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(AssertionError):
        assert_close(merge("iso_cts", tensors, base, common_fraction=0.5), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(7, 13), (13, 7), (3, 4, 5), (5,), ()], ids=str)
def test_tsv_of_one_model_is_that_model(shape: tuple[int, ...]) -> None:
    tensor, base = draw(shape, 2)
    assert_close(merge("tsv", [tensor], base), tensor, rtol=1e-10, atol=1e-10)
    assert_close(merge("tsv", [tensor], base, **{"lambda": 0.0}), base, rtol=1e-14, atol=1e-14)


def test_tsv_keeps_tasks_that_do_not_meet() -> None:
    """Deltas in perpendicular directions, few enough: their sum."""
    base = torch.zeros(6, 6, dtype=torch.float64)
    first, second = base.clone(), base.clone()
    first[0, 1], first[1, 0], second[3, 3], second[4, 5] = 3.0, 2.0, 5.0, 1.0
    assert_close(merge("tsv", [first, second], base), first + second, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_stacks_are_matrices_one_by_one_and_blocks_do_not_matter(name: str) -> None:
    *tensors, base = draw((3, 4, 5), 3)
    result = merge(name, tensors, base)
    for i in range(3):
        assert_close(merge(name, [t[i] for t in tensors], base[i]), result[i], rtol=1e-10, atol=1e-10)
    assert torch.equal(merge(name, tensors, base, block=11), result)


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_rounded_once(name: str) -> None:
    models = [t.float() for t in draw((9, 7), 3)]
    *tensors, base = models
    exact = merge(name, [t.double() for t in tensors], base.double())
    found = merge(name, tensors, base)
    assert found.dtype == torch.float32
    assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_matrix_gets_the_mean(name: str, shape: tuple[int, ...]) -> None:
    a, b, base = draw(shape, 3)
    expected = base + 0.7 * ((a + b) / 2 - base)
    assert_close(merge(name, [a, b], base, block=11, **{"lambda": 0.7}), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_no_elements(name: str, shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape)
    assert merge(name, [empty, empty], empty).shape == shape


@pytest.mark.parametrize("shape", [(7, 13), (1, 4), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_models_that_do_not_differ_from_the_base(name: str, shape: tuple[int, ...]) -> None:
    delta, base = draw(shape, 2)
    assert torch.equal(merge(name, [base, base, base], base), base)
    opposite = merge(name, [base + delta, base - delta], base)
    assert opposite.isfinite().all()
    assert (opposite - base).norm() <= 4 * delta.norm()
    assert merge(name, [base, base + delta, base], base).isfinite().all()


def test_tsv_leaves_out_directions_that_are_not_there() -> None:
    """A zero delta takes its share of the rank, but turns nobody; two equal tasks are one."""
    delta, base = draw((6, 9), 2)
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    half = (u[:, :3] * s[:3]) @ vh[:3]
    for other in (base, base + delta):
        assert_close(merge("tsv", [base + delta, other], base), base + half, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["iso_c", "iso_cts"])
def test_iso_moves_no_direction_that_no_task_moves(name: str) -> None:
    a, b, c, d = draw((12,), 4)
    base = torch.zeros(12, 12, dtype=torch.float64)
    tasks = [torch.outer(a, b), torch.outer(c, d)]
    values = torch.linalg.svdvals(merge(name, tasks, base))
    assert_close(values[:2], values[:1].expand(2), rtol=1e-8, atol=1e-8)
    assert values[2] < 1e-8 * values[0]


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_is_between_none_and_all(fraction: float) -> None:
    a, base = draw((4, 5), 2)
    with pytest.raises(OptionError, match="common_fraction"):
        merge("iso_cts", [a], base, common_fraction=fraction)
