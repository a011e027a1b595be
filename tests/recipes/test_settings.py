"""Values along the layers and by names of tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symfuse.recipes import Case, Setting, parse_recipe

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6)


def gradient(values: list[float]) -> Setting:
    return Setting((Case(tuple(values)),))


@given(numbers)
def test_a_gradient_passes_through_its_values(values: list[float]) -> None:
    setting = gradient(values)
    assert setting.at("w", 0) == values[0]
    assert setting.at("w", 1) == values[-1]
    if len(values) in (2, 3, 5):  # the fractions are exact
        assert [setting.at("w", i / (len(values) - 1)) for i in range(len(values))] == values


@given(numbers, st.floats(0, 1))
def test_between_its_values_a_gradient_stays_between_them(values: list[float], t: float) -> None:
    found = gradient(values).at("w", t)
    assert min(values) - 1e-9 * abs(min(values)) <= found <= max(values) + 1e-9 * abs(max(values))


@given(st.floats(-1e6, 1e6), st.integers(1, 6), st.floats(0, 1))
def test_equal_values_give_exactly_that_value(value: float, n: int, t: float) -> None:
    assert gradient([value] * n).at("w", t) == value


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.floats(0, 1))
def test_of_true_and_false_one_is_chosen(values: list[bool], t: float) -> None:
    assert Setting((Case(tuple(values)),)).at("w", t) is values[int(t * (len(values) - 1))]


def test_the_midpoints_are_linear() -> None:
    assert gradient([0, 1, 0.5]).at("w", 0.25) == 0.5
    assert gradient([0, 1, 0.5]).at("w", 0.75) == 0.75
    assert Setting((Case(("row", "column")),)).at("w", 0.99) == "row"


def test_the_first_filter_that_is_part_of_the_name_holds() -> None:
    setting = Setting((Case((1.0,), "mlp"), Case((2.0,), "layers.0"), Case((3.0, 5.0), "attn")))
    assert setting.at("layers.0.mlp.up", 0) == 1.0
    assert setting.at("layers.0.attn.q", 0) == 2.0
    assert setting.at("layers.1.attn.q", 0.5) == 4.0
    assert setting.at("norm", 0) is None
    assert Setting((Case((1.0,), "mlp"), Case((2.0,), "*"), Case((3.0,)))).at("norm", 0) == 2.0


@pytest.mark.parametrize(
    ("written", "tensor", "t", "value"),
    [
        ("2", "w", 0, 2.0),
        ("1e-5", "w", 0, 1e-5),  # a text in YAML 1.1
        ("[1e-5, 3e-5]", "w", 0.5, 2e-5),
        ("{value: 0.5}", "w", 0, 0.5),
        ("{filter: mlp, value: [0, 1]}", "mlp", 0.5, 0.5),
        ("{filter: mlp, value: [0, 1]}", "attn", 0.5, None),
        ("[{filter: mlp, value: 1e-5}, {value: 2}]", "mlp", 0, 1e-5),
        ('[{filter: mlp, value: 1e-5}, {filter: "*", value: 2}]', "attn", 0, 2.0),
    ],
)
def test_the_forms_of_a_parameter(written: str, tensor: str, t: float, value: float | None) -> None:
    recipe = parse_recipe(f"merge_method: linear\nmodels: [{{model: a}}]\nparameters: {{weight: {written}}}")
    found = recipe.parameters["weight"].at(tensor, t)
    assert found is None if value is None else found == pytest.approx(value, rel=1e-15)
