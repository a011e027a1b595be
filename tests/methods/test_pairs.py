"""Methods of one model, of a model and its base, and the plain mean."""

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
from symfuse.methods.parts.sparsify import kth_largest

SHAPES = [(7, 13), (5,), (), (3, 4, 5)]


def merge(name: str, tensors: Sequence[Tensor], base: Tensor | None = None, block: int = BLOCK, **given: Any) -> Tensor:
    first = tensors[0]
    origin = None if base is None else Source.of(base)
    stream = Stream("w", first.shape, [Source.of(t) for t in tensors], origin, dtype=first.dtype, block=block)
    return torch.cat([part.reshape(-1) for part in lookup(name)(stream, given)]).reshape(first.shape)


def draw(shape: Sequence[int], count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {  # models, base, parameters
    "nearswap": (1, True, {"t": 0.5}),
    "arcee_fusion": (1, True, {}),
    "passthrough": (1, False, {"scale": [1.5]}),
    "soup": (3, False, {}),
}


@pytest.mark.parametrize("shape", [(7, 13), (5,), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_mergekit_agrees(name: str, shape: tuple[int, ...]) -> None:
    api = pytest.importorskip("mergekit.merge_methods.api", reason="mergekit, which this compares with, is missing")
    count, based, parameters = CASES[name]
    *tensors, base = draw(shape, count + 1)
    there = ("linear", {"weight": [1.0] * count}) if name == "soup" else (name, parameters)
    inputs = [base, *tensors] if based else tensors
    expected = api.merge_tensors(inputs, there[0], parameters=there[1], base_index=0 if based else None)
    assert_close(merge(name, tensors, base if based else None, **parameters), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_blocks_do_not_matter(name: str, shape: tuple[int, ...]) -> None:
    count, based, parameters = CASES[name]
    *tensors, base = draw(shape, count + 1, torch.float32)
    origin = base if based else None
    result = merge(name, tensors, origin, **parameters)
    assert result.isfinite().all()
    assert torch.equal(merge(name, tensors, origin, block=11, **parameters), result)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_no_elements(name: str, shape: tuple[int, ...]) -> None:
    count, based, parameters = CASES[name]
    empty = torch.zeros(shape)
    assert merge(name, [empty] * count, empty if based else None, **parameters).shape == shape


@pytest.mark.parametrize("name", ["nearswap", "arcee_fusion", "soup"])
def test_equal_models_give_themselves_to_the_bit(name: str) -> None:
    count, based, parameters = CASES[name]
    (tensor,) = draw((7, 13), 1, torch.float32)
    assert torch.equal(merge(name, [tensor] * count, tensor if based else None, **parameters), tensor)


def test_passthrough_copies_and_scales() -> None:
    (tensor,) = draw((7, 13), 1, torch.float32)
    before = tensor.clone()
    assert torch.equal(merge("passthrough", [tensor]), tensor)
    assert torch.equal(merge("passthrough", [tensor], scale=[-0.5]), tensor * -0.5)
    assert torch.equal(tensor, before)


def test_soup_is_the_mean() -> None:
    tensors = draw((3, 4, 5), 3)
    assert_close(merge("soup", tensors), sum(tensors) / 3, rtol=1e-14, atol=1e-14)


def test_nearswap_moves_by_at_most_t() -> None:
    other, base = draw((7, 13), 2, torch.float32)
    result = merge("nearswap", [other], base, t=0.5)
    near = (other - base).abs() <= 0.5
    assert near.any()
    assert not near.all()
    assert torch.equal(result[near], other[near])
    assert_close((result - base)[~near].abs(), torch.full((int((~near).sum()),), 0.5))
    assert torch.equal(merge("nearswap", [other], base, t=0.0), base)
    assert torch.equal(merge("nearswap", [other], base, t=100.0), other)


def test_nearswap_does_not_move_away() -> None:
    with pytest.raises(OptionError, match="t is -0"):
        merge("nearswap", draw((5,), 1), draw((5,), 1)[0], t=-0.1)


def test_arcee_fusion_by_its_formula() -> None:
    other, base = draw((40, 9), 2)
    p, q = other.softmax(-1) + 1e-8, base.softmax(-1) + 1e-8
    importance = (other - base).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    low, median, high = (importance.reshape(-1).sort().values[i] for i in (89, 179, 269))  # of 360 values
    taken = importance >= median + 1.5 * (high - low)
    assert 0 < int(taken.sum()) < 100
    assert torch.equal(merge("arcee_fusion", [other], base, block=20), torch.where(taken, other, base))


def test_arcee_fusion_counts_places_as_mergekit_does() -> None:
    """Few values, where a place more or less changes the result."""
    values = draw((30, 2, 4, 5), 1)[0]
    for base, other in values:
        p, q = other.softmax(-1) + 1e-8, base.softmax(-1) + 1e-8
        importance = (other - base).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
        low, median, high = (importance.reshape(-1).sort().values[i] for i in (4, 9, 14))  # of 20 values
        expected = torch.where(importance >= median + 1.5 * (high - low), other, base)
        assert torch.equal(merge("arcee_fusion", [other], base), expected)


def test_arcee_fusion_where_no_distribution_changes_is_the_other_model() -> None:
    """A softmax does not see what is added to a whole row; a scalar's is always 1."""
    base = draw((), 1)[0]
    assert torch.equal(merge("arcee_fusion", [base + 1], base), base + 1)
    assert torch.equal(merge("arcee_fusion", [torch.ones(4, 5)], torch.zeros(4, 5)), torch.ones(4, 5))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0, 2.0**60, width=32, allow_subnormal=True), min_size=1, max_size=40),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
def test_order_statistics_are_those_of_a_sort(values: list[float], dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=dtype).abs()  # no -0.0
    if dtype == torch.float64:
        tensor = tensor / 3  # bits below those of float32
    ranks = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3))
    expected = tensor.sort().values[ranks].tolist()
    from_top = [len(values) - rank for rank in ranks]
    (cuts,) = kth_largest(lambda: ([part] for part in tensor.split(7)), [from_top], dtype)
    assert [cut.value for cut in cuts] == expected
