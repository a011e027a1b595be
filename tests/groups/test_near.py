"""Elements near the identity by their parameters: every group that has any, against dense matrices and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.groups import (
    GROUPS,
    Centred,
    Conformal,
    Element,
    Group,
    Invertible,
    Linear,
    Monomial,
    Orthogonal,
    Rotary,
    Scaling,
    Similarity,
)

SMOOTH = {name: group for name, group in GROUPS.items() if group.tangent(2)}
APART = {name: group for name, group in GROUPS.items() if not group.tangent(2)}

every_smooth = pytest.mark.parametrize("group", SMOOTH.values(), ids=list(SMOOTH))
every_batch = pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
every_size = pytest.mark.parametrize("n", [1, 2, 5])


def fitting(group: Group, n: int) -> int:
    return group.size or n


def zeros(group: Group, n: int, batch: tuple[int, ...], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: torch.zeros((*batch, *shape), dtype=dtype) for name, shape in group.tangent(n).items()}


def drawn(group: Group, n: int, batch: tuple[int, ...], size: float = 0.5, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    at = zeros(group, n, batch)
    return {name: size * torch.randn(t.shape, generator=rng, dtype=t.dtype) for name, t in at.items()}


def dense(g: Element) -> Tensor:
    """The matrix with its graph, by columns."""
    eye = torch.eye(g.size, dtype=torch.float64).expand(*g.batch, g.size, g.size)
    return g.act(eye, dim=len(g.batch))


def test_which_groups_have_parameters() -> None:
    assert set(APART) == {"permutation", "sign", "signed"}
    assert set(SMOOTH) == {
        "scaling", "monomial", "signed-monomial", "orthogonal", "centred", "conformal", "invertible", "phase", "rotary"
    }  # fmt: skip


@pytest.mark.parametrize("group", APART.values(), ids=list(APART))
def test_without_parameters_none_is_near_another(group: Group) -> None:
    assert group.tangent(5) == {}
    with pytest.raises(SymmetryError, match=f"the elements of the group {group.name} lie apart"):
        group.near({})


@every_smooth
@every_size
@every_batch
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_at_zero_it_is_the_identity_exactly(group: Group, n: int, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    n = fitting(group, n)
    g = group.near(zeros(group, n, batch, dtype))
    assert g.is_identity()
    assert (g.size, g.batch) == (n, batch)
    assert all(t.dtype == dtype for t in g.tensors().values() if t.is_floating_point())


@every_smooth
@every_size
@every_batch
def test_every_value_gives_an_element_of_the_group(group: Group, n: int, batch: tuple[int, ...]) -> None:
    n = fitting(group, n)
    for size in (0.01, 0.5, 3.0):
        g = group.near(drawn(group, n, batch, size))
        assert type(g) is type(group.identity(n, batch))
        assert group.contains(g, 1e-9)
        assert (g.size, g.batch) == (n, batch)
    alone = {"orthogonal": 1, "centred": 2}  # up to so many units the identity is near no other element
    gap = (g.to_dense() - torch.eye(n, dtype=torch.float64)).abs().max()
    assert (float(gap) < 1e-12) == (n <= alone.get(group.name, 0))


@every_smooth
def test_the_elements_of_a_batch_are_those_of_its_parts(group: Group) -> None:
    n, batch = fitting(group, 5), (2, 3)
    at = drawn(group, n, batch)
    whole = group.near(at).to_dense()
    for i in range(2):
        for j in range(3):
            one = group.near({name: t[i, j] for name, t in at.items()}).to_dense()
            torch.testing.assert_close(one, whole[i, j], rtol=1e-12, atol=1e-12)


@every_smooth
@pytest.mark.parametrize("part", ["primal", "dual"])
@pytest.mark.parametrize("size", [0.0, 0.3], ids=["at the identity", "elsewhere"])
def test_its_gradient_is_that_of_finite_differences(group: Group, part: str, size: float) -> None:
    n, batch = fitting(group, 4), (2,)
    at = drawn(group, n, batch, size)
    names = list(at)
    c = torch.randn(2, n, n, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def product(*values: Tensor) -> Tensor:
        g = group.near(dict(zip(names, values, strict=True)))
        return (dense(g.part(part)) * c).sum()  # type: ignore[arg-type]

    values = tuple(at[name].requires_grad_() for name in names)
    assert torch.autograd.gradcheck(product, values, eps=1e-6, atol=1e-7, rtol=1e-5)
    gradients = torch.autograd.grad(product(*values), values)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradient != 0).any() for gradient in gradients)


def curves(group: Group, n: int) -> Iterator[Tensor]:
    """The derivatives of the curves through the identity that the parameters draw, by central differences."""
    step = 1e-5
    at = zeros(group, n, ())
    for name, t in at.items():
        for i in range(t.numel()):
            ends = []
            for sign in (step, -step):
                moved = {**at, name: t.clone()}
                moved[name].view(-1)[i] = sign
                ends.append(group.near(moved).to_dense())
            yield (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize(
    ("name", "n", "dimension"),
    [
        ("scaling", 4, 4), ("monomial", 4, 4), ("signed-monomial", 4, 4), ("orthogonal", 4, 6), ("centred", 4, 3),
        ("centred", 5, 6), ("conformal", 4, 7), ("invertible", 3, 9), ("phase", 2, 1), ("rotary", 2, 2),
    ],
)  # fmt: skip
def test_they_reach_every_direction_of_the_group(name: str, n: int, dimension: int) -> None:
    """The rank of the derivatives at the identity is the dimension of the group as a manifold."""
    found = torch.stack([d.flatten() for d in curves(GROUPS[name], n)])
    assert int(torch.linalg.matrix_rank(found, atol=1e-6)) == dimension


def test_formulas_written_out() -> None:
    at = drawn(Conformal(), 4, ())
    turn = at["turn"]
    skew = (turn - turn.T) / 2
    eye = torch.eye(4, dtype=torch.float64)
    cayley = (eye + skew / 2) @ torch.linalg.inv(eye - skew / 2)
    torch.testing.assert_close(Orthogonal().near({"turn": turn}).to_dense(), cayley, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(Conformal().near(at).to_dense(), at["log"].exp() * cayley, rtol=1e-12, atol=1e-12)
    away = eye - 1 / 4
    centred = away @ skew @ away
    expected = (eye + centred / 2) @ torch.linalg.inv(eye - centred / 2)
    torch.testing.assert_close(Centred().near({"turn": turn}).to_dense(), expected, rtol=1e-12, atol=1e-12)
    log = torch.tensor([0.3, -0.2, 0.0], dtype=torch.float64)
    torch.testing.assert_close(Scaling().near({"log": log}).to_dense(), torch.diag(log.exp()))
    plane = Rotary().near({"angle": torch.tensor(0.7).double(), "log": torch.tensor(-0.4).double()}).to_dense()
    z = torch.polar(torch.tensor(-0.4).double().exp(), torch.tensor(0.7).double())
    torch.testing.assert_close(plane, torch.stack([torch.stack([z.real, -z.imag]), torch.stack([z.imag, z.real])]))


def test_an_invertible_map_comes_with_its_inverse() -> None:
    g = Invertible().near(drawn(Invertible(), 6, (3,), 0.4))
    assert isinstance(g, Linear)
    eye = torch.eye(6, dtype=torch.float64).expand(3, 6, 6)
    torch.testing.assert_close(g.matrix @ g.inverse_matrix, eye, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(g.inverse_matrix @ g.matrix, eye, rtol=0.0, atol=1e-12)


@given(n=st.integers(2, 7), seed=st.integers(0, 1000), size=st.floats(0.01, 5))
@settings(max_examples=30, deadline=None)
def test_centred_rotations_keep_the_ones(n: int, seed: int, size: float) -> None:
    q = Centred().near(drawn(Centred(), n, (2,), size, seed)).matrix
    ones = torch.ones(2, n, 1, dtype=torch.float64)
    torch.testing.assert_close(q @ ones, ones, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(q.mT @ ones, ones, rtol=0.0, atol=1e-12)


def outside(g: Element) -> Mapping[str, Tensor]:
    """Tensors of an element that is in no smooth group of its kind: a column is zero, or a scale."""
    tensors = {name: t.clone() for name, t in g.tensors().items()}
    for name, t in tensors.items():
        if name in {"matrix", "scale"}:
            t[..., 0] = 0
    return tensors


@every_smooth
def test_what_is_outside_is_told_apart(group: Group) -> None:
    """The check that the tests above rely on can fail."""
    n = fitting(group, 4)
    g = group.near(drawn(group, n, (2,)))
    assert isinstance(g, Monomial | Similarity | Linear)
    assert not group.contains(g.rebuild(outside(g)), 1e-6)
    if isinstance(g, Linear):
        assert not group.contains(replace(g, inverse_matrix=g.inverse_matrix.mT), 1e-6)
