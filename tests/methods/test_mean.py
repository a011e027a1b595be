"""The mean of tensors: nearer to exact arithmetic than a sum of products, and to the bit where all agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symfuse.methods.parts.mean import mean, steps, sum_to_one

SHARES = [[0.3, 0.7], [0.2, 0.5, 0.3], [1.5, -0.5], [0.0, 1.0], [1.0, 0.0, 0.0], [0.25, 0.25, 1.0, -0.5]]


def fine_tunes(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(count)
    base = torch.randn(20000, generator=g) * 0.02
    return [(base + torch.randn(20000, generator=g) * 0.002).bfloat16().float() for _ in range(count)]


def of_products(tensors: list[Tensor], shares: list[float]) -> Tensor:
    out = tensors[0] * shares[0]
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        out.add_(tensor, alpha=share)
    return out


@pytest.mark.parametrize("shares", SHARES)
def test_it_is_the_weighted_sum(shares: list[float]) -> None:
    tensors = fine_tunes(len(shares))
    exact = torch.stack([share * tensor.double() for share, tensor in zip(shares, tensors, strict=True)]).sum(0)
    out = mean([tensor.clone() for tensor in tensors], steps(shares))
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-8)
    with pytest.raises(AssertionError):  # nor would it do to forget one
        torch.testing.assert_close(tensors[0].double(), exact + 1e-3, rtol=0, atol=2e-8)


def test_it_is_nearer_than_a_sum_of_products() -> None:
    shares = [0.2, 0.5, 0.3]
    tensors = fine_tunes(3)
    exact = torch.stack([share * tensor.double() for share, tensor in zip(shares, tensors, strict=True)]).sum(0)
    ours = (mean([tensor.clone() for tensor in tensors], steps(shares)).double() - exact).abs().mean()
    assert ours < 0.8 * (of_products(tensors, shares).double() - exact).abs().mean()


@pytest.mark.parametrize("shares", SHARES)
def test_where_all_agree_it_is_the_entry_to_the_bit(shares: list[float]) -> None:
    values = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 0.1, -3e38, 7.0])
    out = mean([values.clone() for _ in shares], steps(shares))
    assert torch.equal(out.view(torch.int32), values.view(torch.int32))


def test_nearby_ways_do_not_keep_it() -> None:
    values, zero = torch.linspace(0.01, 1, 1000), torch.tensor([-0.0])
    assert not torch.equal(of_products([values] * 3, [0.2, 0.5, 0.3]), values)
    assert not torch.signbit(torch.lerp(zero, zero, 0.3)).item()


weight = st.floats(-3, 3).filter(lambda w: w == 0 or abs(w) > 1e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(weight, min_size=1, max_size=6).filter(lambda ws: sum(ws) > 0.05))
def test_what_was_taken_never_sums_to_zero(weights: list[float]) -> None:
    shares = [w / sum(weights) for w in weights]
    assert sum_to_one(shares)
    order = steps(shares)
    assert [i for i, _ in order] == sorted((i for i, s in enumerate(shares) if s), key=lambda i: -shares[i])
    total = 0.0
    for number, share in order:
        total += shares[number]
        assert total > 0
        assert share == shares[number] / total
