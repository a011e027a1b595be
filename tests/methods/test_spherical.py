"""Methods of the Gram matrix: against mergekit, against their formulas, and what holds of them whatever the input."""

from __future__ import annotations

import math
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
from symfuse.merging.stream import BLOCK
from symfuse.methods import lookup
from symfuse.methods.parts.gram import gram, models

SHAPES = [(7, 13), (5,), (), (3, 4, 5)]
SMALL = 11  # elements of a block: less than a row of 13, two rows of 5


def merge(name: str, tensors: Sequence[Tensor], base: Tensor | None = None, block: int = BLOCK, **given: Any) -> Tensor:
    first = tensors[0]
    origin = None if base is None else Source.of(base)
    stream = Stream("w", first.shape, [Source.of(t) for t in tensors], origin, dtype=first.dtype, block=block)
    return torch.cat([part.reshape(-1) for part in lookup(name)(stream, given)]).reshape(first.shape)


def draw(shape: Sequence[int], count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


CASES: dict[str, tuple[str, int, bool, dict[str, Any]]] = {  # method, models, base, parameters
    "slerp": ("slerp", 1, True, {"t": 0.3}),
    "slerp beyond": ("slerp", 1, True, {"t": 1.4}),
    "nuslerp": ("nuslerp", 2, False, {"weight": [1.0, 3.0]}),
    "nuslerp about a base": ("nuslerp", 2, True, {"weight": [1.0, 3.0]}),
    "nuslerp of no weight": ("nuslerp", 2, False, {"weight": [1.0, -1.0]}),
    "nuslerp by rows": ("nuslerp", 2, True, {"weight": [2.0, 3.0], "nuslerp_flatten": False}),
    "nuslerp by columns": (
        "nuslerp",
        2,
        True,
        {"weight": [2.0, 3.0], "nuslerp_flatten": False, "nuslerp_row_wise": True},
    ),
    "multislerp": ("multislerp", 3, False, {"weight": [1.0, 2.0, 4.0]}),
    "multislerp about a base": ("multislerp", 3, True, {"weight": [1.0, 2.0, 4.0]}),
    "multislerp not normalised": ("multislerp", 3, False, {"weight": [1.0, 2.0, 4.0], "normalize_weights": False}),
    "karcher": ("karcher", 3, False, {}),
    "karcher, one step": ("karcher", 3, False, {"max_iter": 1}),
    "model_stock": ("model_stock", 3, True, {}),
    "model_stock by rows": ("model_stock", 3, True, {"filter_wise": True}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(7, 13), (5,), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_mergekit_agrees(case: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    api = pytest.importorskip("mergekit.merge_methods.api", reason="mergekit, which this compares with, is missing")
    name, count, based, parameters = CASES[case]
    *tensors, base = draw(shape, count + 1, dtype)
    tensors = [t + base for t in tensors]  # neither parallel nor perpendicular
    inputs = [base, *tensors] if based else tensors
    expected = api.merge_tensors(inputs, name, parameters=parameters, base_index=0 if based else None)
    # mergekit adds eps = 1e-8 to lengths; float32 angles are good to some 1e-6
    tolerance = 1e-7 if dtype == torch.float64 else 2e-5
    assert_close(merge(name, tensors, base if based else None, **parameters), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_blocks_do_not_matter(case: str, shape: tuple[int, ...]) -> None:
    name, count, based, parameters = CASES[case]
    *tensors, base = draw(shape, count + 1)
    origin = base if based else None
    result = merge(name, tensors, origin, **parameters)
    assert result.isfinite().all()
    assert_close(merge(name, tensors, origin, block=SMALL, **parameters), result, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_no_elements(case: str, shape: tuple[int, ...]) -> None:
    name, count, based, parameters = CASES[case]
    empty = torch.zeros(shape)
    assert merge(name, [empty] * count, empty if based else None, **parameters).shape == shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if "not normalised" not in case and "no weight" not in case])
def test_equal_models_give_themselves(case: str, dtype: torch.dtype) -> None:
    name, count, based, parameters = CASES[case]
    tensor, base = draw((7, 13), 2, dtype)
    origin = None if not based else tensor if name == "slerp" else base
    ulps = 8 * torch.finfo(dtype).eps
    assert_close(merge(name, [tensor] * count, origin, **parameters), tensor, rtol=ulps, atol=ulps)


@pytest.mark.parametrize("others", ["zero", "opposite", "one zero"])
@pytest.mark.parametrize("case", CASES)
def test_degenerate_models_give_finite_results(case: str, others: str) -> None:
    name, count, based, parameters = CASES[case]
    (tensor,) = draw((7, 13), 1, torch.float32)
    second = {"zero": tensor * 0, "opposite": -tensor, "one zero": tensor * 0}[others]
    first = second if others == "zero" else tensor
    base = torch.zeros_like(tensor) if name != "slerp" else first
    tensors = [second] if name == "slerp" else [first, second, first][:count]
    result = merge(name, tensors, base if based else None, **parameters)
    assert result.isfinite().all()
    assert result.norm() <= 8 * tensor.norm()  # weights add up to 7
    if others == "zero":
        assert torch.equal(result, torch.zeros_like(tensor))


def test_slerp_by_its_formula() -> None:
    base, other = draw((7, 13), 2)
    angle = math.acos(float((base * other).sum() / base.norm() / other.norm()))
    expected = (math.sin(0.7 * angle) * base + math.sin(0.3 * angle) * other) / math.sin(angle)
    assert_close(merge("slerp", [other], base, t=0.3), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(AssertionError):
        assert_close(merge("slerp", [other], base, t=0.3), 0.7 * base + 0.3 * other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1.0, -1.0, 3.0, 0.0])
def test_slerp_of_parallel_or_zero_tensors_is_straight(scale: float) -> None:
    (base,) = draw((7, 13), 1)
    assert_close(merge("slerp", [scale * base], base, t=0.3), (0.7 + 0.3 * scale) * base, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dimension", [0, 1])
def test_nuslerp_by_its_formula(dimension: int) -> None:
    first, second, base = draw((7, 13), 3)
    a, b = first - base, second - base
    cosine = (a * b).sum(dimension) / a.norm(dim=dimension) / b.norm(dim=dimension)
    angle = torch.acos(cosine).unsqueeze(dimension)
    expected = base + (torch.sin(0.25 * angle) * a + torch.sin(0.75 * angle) * b) / torch.sin(angle)
    given = {"weight": [1.0, 3.0], "nuslerp_flatten": False, "nuslerp_row_wise": dimension == 0}
    assert_close(merge("nuslerp", [first, second], base, **given), expected, rtol=1e-10, atol=1e-10)


def test_multislerp_by_its_formula() -> None:
    """With the steps in tangent space that the implementation leaves out."""
    tensors, weights = draw((5,), 3), [0.2, 0.3, 0.5]
    units = [t / t.norm() for t in tensors]
    mean = sum(w * u for w, u in zip(weights, units, strict=True))
    mean = mean / mean.norm()
    tangent = sum(w * (u - (u @ mean) * mean) for w, u in zip(weights, units, strict=True))
    assert tangent.norm() < 1e-12
    length = sum(w * t.norm() for w, t in zip(weights, tensors, strict=True))
    assert_close(merge("multislerp", tensors, weight=weights, eps=0.0), length * mean, rtol=1e-10, atol=1e-10)


def test_multislerp_where_directions_cancel_is_the_weighted_sum() -> None:
    a, b = draw((7, 13), 2)
    result = merge("multislerp", [a, -2 * a, b, -b], weight=[1.0, 1.0, 1.0, 1.0])
    assert_close(result, -a / 4, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["multislerp", "karcher"])
def test_one_model_is_itself_to_the_bit(name: str) -> None:
    tensor, base = draw((7, 13), 2, torch.float32)
    parameters = {"weight": [2.0]} if name == "multislerp" else {}
    assert torch.equal(merge(name, [tensor], base if name == "multislerp" else None, **parameters), tensor)


def test_karcher_is_where_the_directions_balance() -> None:
    tensors = [t + 1 for t in draw((7, 13), 4)]
    result = merge("karcher", tensors, max_iter=100, tol=1e-12)
    point = result / result.norm()
    tangent = torch.zeros_like(point)
    for t in tensors:
        cosine = (t * point).sum() / t.norm()
        away = t / t.norm() - cosine * point
        tangent += torch.acos(cosine) * away / away.norm()
    assert tangent.norm() < 1e-7
    assert_close(result.norm(), torch.stack([t.norm() for t in tensors]).mean(), rtol=1e-10, atol=1e-10)


def test_karcher_of_opposite_tensors_is_the_first_and_of_zero_ones_the_others() -> None:
    (tensor,) = draw((7, 13), 1)
    assert_close(merge("karcher", [tensor, -3 * tensor]), 2 * tensor, rtol=1e-12, atol=1e-12)
    assert_close(merge("karcher", [0 * tensor, -tensor, tensor]), -2 / 3 * tensor, rtol=1e-12, atol=1e-12)
    # two of one direction and one of the other: the opposite one pulls nowhere
    assert_close(merge("karcher", [tensor, -tensor, tensor]), tensor, rtol=1e-12, atol=1e-12)


def test_karcher_of_two_is_the_middle_of_their_arc() -> None:
    base, other = draw((7, 13), 2)
    base, other = base / base.norm(), other / other.norm()
    assert_close(merge("karcher", [base, other]), merge("slerp", [other], base, t=0.5), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [False, True])
def test_model_stock_by_its_formula(rows: bool) -> None:
    a, b, c, base = draw((7, 13), 4)
    deltas = torch.stack([a - base, b - base, c - base])
    flat = deltas if rows else deltas.reshape(3, 1, -1)
    units = flat / flat.norm(dim=-1, keepdim=True)
    cosine = sum((units[i] * units[j]).sum(-1) for i, j in [(0, 1), (0, 2), (1, 2)]) / 3
    ratio = (3 * cosine / (1 + 2 * cosine))[:, None]
    expected = ratio * (a + b + c) / 3 + (1 - ratio) * base
    assert_close(merge("model_stock", [a, b, c], base, filter_wise=rows), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_model_stock_keeps_the_base_where_deltas_say_nothing(scale: float) -> None:
    delta, base = draw((7, 13), 2)
    result = merge("model_stock", [base + delta * abs(scale), base + delta * scale], base)
    assert_close(result, base, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters", "word"),
    [
        ("multislerp", {"weight": [1.0, -1.0]}, "sum to zero"),
        ("multislerp", {"weight": [1.0, 1.0], "eps": -1.0}, "eps"),
        ("multislerp", {"weight": [1.0, 1.0], "eps": math.inf}, "eps"),
        ("karcher", {"max_iter": -1}, "max_iter"),
        ("karcher", {"tol": -1.0}, "tol"),
    ],
)
def test_what_makes_no_sense_is_named(name: str, parameters: dict[str, Any], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        merge(name, draw((5,), 2), **parameters)


def test_inner_products_are_exact_enough_for_small_angles() -> None:
    """sin² of 1e-10, from float32 values, to three digits: products in float32 would leave none."""
    first, other = draw((300, 1000), 2, torch.float32)
    second = first + 1e-5 * other
    sources = [Source.of(first), Source.of(second)]
    found = gram(Stream("w", first.shape, sources), models)
    wide = torch.stack([first.double().reshape(-1), second.double().reshape(-1)])
    assert_close(found, wide @ wide.T, rtol=1e-12, atol=0.0)
    small = Stream("w", first.shape, sources, block=7000)
    assert_close(gram(small, models), found, rtol=1e-12, atol=0.0)
    by_rows = gram(small, models, rows=True)
    assert by_rows.shape == (2, 2, 300)
    assert_close(by_rows.sum(-1), found, rtol=1e-12, atol=0.0)
    sine = found.det() / found[0, 0] / found[1, 1]
    apart = wide[1] - wide[0]
    apart -= (apart @ wide[0]) / (wide[0] @ wide[0]) * wide[0]
    assert_close(sine, (apart @ apart) / (wide[1] @ wide[1]), rtol=1e-3, atol=0.0)


vectors = st.integers(0, 10**6).map(lambda seed: draw((3, 5), 4, seed=seed))


@settings(max_examples=25, deadline=None)
@given(vectors, st.floats(0, 1))
def test_slerp_stays_on_the_sphere_and_ends_at_its_ends(tensors: list[Tensor], t: float) -> None:
    base, other = (x / x.norm() for x in tensors[:2])
    assert_close(merge("slerp", [other], base, t=t).norm(), torch.tensor(1.0).double(), rtol=1e-3, atol=0.0)
    if abs(float((base * other).sum())) < 0.9995:
        assert_close(merge("slerp", [other], base, t=t).norm(), torch.tensor(1.0).double(), rtol=1e-12, atol=0.0)
    assert_close(merge("slerp", [other], base, t=0.0), base, rtol=1e-14, atol=1e-14)
    assert_close(merge("slerp", [other], base, t=1.0), other, rtol=1e-14, atol=1e-14)


@settings(max_examples=25, deadline=None)
@given(vectors, st.permutations(range(4)))
def test_karcher_does_not_depend_on_the_order(tensors: list[Tensor], order: list[int]) -> None:
    expected = merge("karcher", tensors)
    assert_close(merge("karcher", [tensors[i] for i in order]), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(vectors)
def test_a_rotation_of_the_inputs_rotates_the_result(tensors: list[Tensor]) -> None:
    rotation = torch.linalg.qr(torch.randn(15, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]

    def turned(tensor: Tensor) -> Tensor:
        return (rotation @ tensor.reshape(15)).reshape(3, 5)

    for case, (name, count, based, parameters) in CASES.items():
        if "by rows" in case or "by columns" in case:
            continue
        *some, base = tensors[: count + 1]
        expected = turned(merge(name, some, base if based else None, **parameters))
        found = merge(name, [turned(t) for t in some], turned(base) if based else None, **parameters)
        assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weight", [3e38, -3e38])
def test_coefficients_beyond_the_working_dtype_are_refused(weight: float) -> None:
    """Each weight fits in float32; the coefficient that it leads to is larger."""
    tensors = draw((7, 13), 2, torch.float32)
    with pytest.raises(IncompatibleError, match=r"^w: the merge does not fit in torch\.float32; use smaller weights"):
        merge("multislerp", tensors, weight=[weight, weight], normalize_weights=False)
