"""Every group of the table against dense matrices, and the solvers against brute force.

A new group inherits all but the brute force; it adds one line to `DEFINITIONS`, what its matrices are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from symfuse.errors import SymmetryError
from symfuse.groups import (
    ELEMENTS,
    GROUPS,
    Conformal,
    Element,
    Group,
    Invertible,
    Linear,
    Moments,
    Monomial,
    Orthogonal,
    PartMoments,
    Permutation,
    Phase,
    PositiveMonomial,
    Rotary,
    Scaling,
    Sign,
    Signed,
    SignedMonomial,
    Similarity,
    objective,
)
from symfuse.groups.scale import LIMIT

Features = dict[str, tuple[Tensor, Tensor]]  # part → (X, Y), each [*b, n, columns]

every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=list(GROUPS))
every_batch = pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
every_size = pytest.mark.parametrize("n", [1, 2, 5])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=rng(seed), dtype=torch.float64)


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def fitting(group: Group, n: int) -> int:
    """The size of an axis: n, or the only one that the group acts on."""
    return group.size or n


def has_permutation_part(group: Group) -> bool:
    try:
        group.identity(2, ()).forget()
    except SymmetryError:
        return False
    return True


def moments(features: Features) -> PartMoments:
    """With full Gram matrices, which every group takes."""
    return {part: Moments(x @ y.mT, x @ x.mT, y @ y.mT) for part, (x, y) in features.items()}


def norms_alone(m: PartMoments) -> PartMoments:
    return {part: Moments(v.xy, v.x_norms, v.y_norms) for part, v in m.items()}


def dense_part(g: Element, part: str) -> Tensor:
    dense = g.to_dense()
    if part == "dual":
        return torch.linalg.inv(dense).mT
    return dense if part == "primal" else (dense != 0).double()


def dense_objective(g: Element, features: Features) -> Tensor:
    return sum((x - dense_part(g, part) @ y).square().sum((-2, -1)) for part, (x, y) in features.items())


def size_of(features: Features) -> Tensor:
    """|X|² + |Y|²: rounding errors of objectives are relative to it."""
    return sum(x.square().sum((-2, -1)) + y.square().sum((-2, -1)) for x, y in features.values())


def part_sets(group: Group) -> list[tuple[str, ...]]:
    sets = [("primal",), ("dual",), ("primal", "dual")]
    return sets + ([("primal", "dual", "plain"), ("plain", "dual")] if has_permutation_part(group) else [])


group_and_parts = pytest.mark.parametrize(
    ("group", "parts"),
    [
        pytest.param(group, parts, id=f"{name}-{'+'.join(parts)}")
        for name, group in GROUPS.items()
        for parts in part_sets(group)
    ],
)


# -- laws ------------------------------------------------------------------------------------------


@every_group
@every_batch
@every_size
def test_group_laws(group: Group, batch: tuple[int, ...], n: int) -> None:
    n = fitting(group, n)
    source = rng(n)
    g, h, k = (group.random(n, batch, source) for _ in range(3))
    one = group.identity(n, batch)
    for element in (g, one, g @ h, g.inverse(), g.dual()):
        assert element.size == n
        assert element.batch == batch
        assert group.contains(element, 1e-12)
    torch.testing.assert_close(one.to_dense(), eye(n).expand(*batch, n, n), rtol=0, atol=0)
    torch.testing.assert_close((g @ h).to_dense(), g.to_dense() @ h.to_dense())
    torch.testing.assert_close(((g @ h) @ k).to_dense(), (g @ (h @ k)).to_dense())
    for product in (g @ g.inverse(), g.inverse() @ g):
        torch.testing.assert_close(product.to_dense(), one.to_dense(), rtol=0, atol=1e-14)
    for same in (one @ g, g @ one):
        torch.testing.assert_close(same.to_dense(), g.to_dense(), rtol=0, atol=0)


@every_group
@every_batch
@every_size
def test_variances_are_those_of_the_matrix(group: Group, batch: tuple[int, ...], n: int) -> None:
    n = fitting(group, n)
    g = group.random(n, batch, rng(n))
    torch.testing.assert_close(g.dual().to_dense(), torch.linalg.inv(g.to_dense()).mT)
    torch.testing.assert_close(g.part("primal").to_dense(), g.to_dense(), rtol=0, atol=0)
    torch.testing.assert_close(g.part("dual").to_dense(), dense_part(g, "dual"))
    if has_permutation_part(group):
        assert torch.equal(g.forget().to_dense(), (g.to_dense() != 0).double())
        assert torch.equal(g.part("plain").to_dense(), g.forget().to_dense())
        assert g.forget().reorders_only
    else:
        with pytest.raises(SymmetryError, match="no permutation part"):
            g.forget()
        with pytest.raises(SymmetryError, match="no permutation part"):
            group.best(moments({"plain": (normal(n, 3), normal(n, 3))}))


@every_group
@every_size
def test_self_dual_is_what_it_says(group: Group, n: int) -> None:
    n = fitting(group, n)
    g = group.random(n, (20,), rng(n))
    same = bool(torch.isclose(g.dual().to_dense(), g.to_dense(), atol=1e-9).all())
    assert same == group.self_dual


@every_group
@every_batch
@pytest.mark.parametrize("others", [(), (3,), (3, 4), (1, 3, 2)], ids=str)
def test_acting_is_the_matrix_product_along_every_dimension(
    group: Group, batch: tuple[int, ...], others: tuple[int, ...]
) -> None:
    n = fitting(group, 5)
    g = group.random(n, batch, rng(1))
    for at in range(len(others) + 1):
        shape = (*batch, *others[:at], n, *others[at:])
        dim = len(batch) + at
        w = normal(*shape, seed=at)
        before = w.clone()
        rows = w.movedim(dim, len(batch)).reshape(*batch, n, -1)
        expected = (g.to_dense() @ rows).reshape(*batch, n, *others).movedim(len(batch), dim)
        torch.testing.assert_close(g.act(w, dim), expected)
        torch.testing.assert_close(g.act(w, dim - w.ndim), expected)
        transposed = w.transpose(-1, -2).contiguous().transpose(-1, -2) if w.ndim > 1 else w
        torch.testing.assert_close(g.act(transposed, dim), expected)
        assert torch.equal(w, before)


@every_group
@every_batch
@every_size
def test_inner_product_and_gain_are_those_of_the_matrix(group: Group, batch: tuple[int, ...], n: int) -> None:
    n = fitting(group, n)
    g = group.random(n, batch, rng(n))
    c, y = normal(*batch, n, n), normal(*batch, n, 3, seed=1)
    torch.testing.assert_close(g.inner(c), (g.to_dense() * c).sum((-2, -1)))
    expected = (g.to_dense() @ y).square().sum((-2, -1))
    torch.testing.assert_close(g.gain(y @ y.mT), expected)
    if group.gram:
        with pytest.raises(SymmetryError, match="needs Y Yᵀ"):
            g.gain(y.square().sum(-1))
    else:
        torch.testing.assert_close(g.gain(y.square().sum(-1)), expected)


@every_group
@every_batch
def test_an_element_is_rebuilt_from_its_tensors(group: Group, batch: tuple[int, ...]) -> None:
    n = fitting(group, 5)
    for g in (group.random(n, batch, rng()), group.identity(n, batch)):
        tensors = g.tensors()
        assert all(t.shape[: len(batch)] == batch for t in tensors.values())
        again = g.rebuild(tensors)
        loaded = ELEMENTS[type(g).__name__.lower()](**tensors)
        for copy in (again, loaded):
            assert type(copy) is type(g)
            assert torch.equal(copy.to_dense(), g.to_dense())
            assert copy.tensors().keys() == tensors.keys()


@every_group
@every_batch
def test_only_the_identity_is_the_identity(group: Group, batch: tuple[int, ...]) -> None:
    n = fitting(group, 5)
    assert group.identity(n, batch).is_identity()
    assert not group.random(n, batch, rng(3)).is_identity()
    g = group.identity(n, batch)
    for key, t in g.tensors().items():
        if t.is_floating_point():
            near = g.rebuild(g.tensors() | {key: t + 1e-15})
            assert not near.is_identity()


@every_group
@every_batch
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bfloat16, torch.float16])
def test_what_only_reorders_is_exact_in_every_dtype(group: Group, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    n = fitting(group, 5)
    g = group.random(n, batch, rng())
    if has_permutation_part(group):
        g = g.forget()
    moves_entries = bool(((g.to_dense() == 0) | (g.to_dense() == 1)).all())
    assert g.reorders_only == moves_entries
    if not moves_entries:
        return
    w = torch.randint(-100, 100, (*batch, n, 7), generator=rng(1)).to(dtype)
    if dtype == torch.int64:
        w = w + 2**60
    elif dtype.is_floating_point:
        w[..., 0], w[..., 1] = float("inf"), -0.0
    moved = g.act(w, len(batch))
    assert moved.dtype == dtype
    source = g.to_dense().argmax(-1)[..., None].expand(w.shape)
    bits = {1: torch.int8, 2: torch.int16, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(moved.view(bits), torch.gather(w.view(bits), -2, source))


@every_group
def test_elements_of_equal_seeds_are_equal_and_of_others_are_not(group: Group) -> None:
    one, same, other = (group.random(fitting(group, 5), (20,), rng(seed)).to_dense() for seed in (7, 7, 8))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, one[:1].expand(one.shape))


# -- membership ------------------------------------------------------------------------------------


def is_monomial(m: Tensor) -> bool:
    support = m != 0
    return bool(m.isfinite().all() and (support.sum(-1) == 1).all() and (support.sum(-2) == 1).all())


def is_diagonal(m: Tensor) -> bool:
    return is_monomial(m) and bool((m.diagonal(dim1=-2, dim2=-1) != 0).all())


def is_conformal(m: Tensor, scale: Tensor | None = None) -> bool:
    gram = m @ m.mT
    scale = gram[..., :1, :1] if scale is None else scale
    near = (gram - scale * eye(m.shape[-1])).abs() <= 1e-9 * scale
    return bool(m.isfinite().all() and near.all() and (scale > 0).all())


def keeps_the_mean(m: Tensor) -> bool:
    sums = m.sum(-1)
    return bool(((sums - sums[..., :1]).abs() <= 1e-9).all() and ((sums.abs() - 1).abs() <= 1e-9).all())


def turns_a_plane(m: Tensor) -> bool:
    """Of 2 × 2 matrices: not those that reflect it."""
    return bool((torch.linalg.det(m) > 0).all())


# What the matrices of a group are, in terms of matrices alone.
DEFINITIONS: dict[str, Callable[[Tensor], bool]] = {
    "permutation": lambda m: is_monomial(m) and bool((m[m != 0] == 1).all()),
    "sign": lambda m: bool((m == m[..., :1, :1] * eye(m.shape[-1])).all() and (m[..., 0, 0].abs() == 1).all()),
    "signed": lambda m: is_monomial(m) and bool((m[m != 0].abs() == 1).all()),
    "scaling": lambda m: is_diagonal(m) and bool((m >= 0).all()),
    "monomial": lambda m: is_monomial(m) and bool((m >= 0).all()),
    "signed-monomial": is_monomial,
    "orthogonal": lambda m: is_conformal(m, torch.ones((), dtype=torch.float64)),
    "centred": lambda m: is_conformal(m, torch.ones((), dtype=torch.float64)) and keeps_the_mean(m),
    "conformal": is_conformal,
    "phase": lambda m: is_conformal(m, torch.ones((), dtype=torch.float64)) and turns_a_plane(m),
    "rotary": lambda m: is_conformal(m) and turns_a_plane(m),
    "invertible": lambda m: bool(m.isfinite().all() and (torch.linalg.det(m).abs() > 0).all()),
}
# The kinds of elements that a group takes beside its own.
SUBGROUPS: dict[str, tuple[type[Element], ...]] = {
    **dict.fromkeys(("orthogonal", "centred", "conformal", "phase", "rotary"), (Monomial,)),
    "invertible": (Similarity, Monomial),
}  # fmt: skip


def pool(n: int, batch: tuple[int, ...]) -> Iterator[Element]:
    """Elements of all groups that act on n units, and each of them damaged in one tensor."""
    for group in (one for one in GROUPS.values() if fitting(one, n) == n):
        for seed in range(2):
            g = group.random(n, batch, rng(seed))
            yield from (g, group.identity(n, batch), g.dual())
            for key, t in g.tensors().items():
                first = tuple(0 for _ in t.shape)
                if t.is_floating_point():
                    values = (math.nan, math.inf, -math.inf, 0.0, -1.0, 3.0)
                    damages = [-t, 1.01 * t, 0 * t, *(_put(t, first, value) for value in values)]
                else:
                    damages = [torch.zeros_like(t), t.roll(1, -1), _put(t, first, int(t[(*first[:-1], -1)]))]
                for damaged in damages:
                    yield g.rebuild(g.tensors() | {key: damaged})


def _put(t: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    out = t.clone()
    out[at] = value
    return out


def is_well_formed(g: Element) -> bool:
    """A similarity is an orthogonal matrix and a positive scale, a linear map a matrix and its inverse; else its
    inverse and dual are wrong."""
    if isinstance(g, Linear):
        return bool(((g.matrix @ g.inverse_matrix - eye(g.size)).abs() <= 1e-9).all())
    return isinstance(g, Monomial) or (
        isinstance(g, Similarity)
        and is_conformal(g.matrix, torch.ones((), dtype=torch.float64))
        and (g.scale is None or bool((g.scale > 0).all()))
    )


@every_group
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("n", [2, 5])
def test_a_group_contains_its_elements_and_no_others(group: Group, batch: tuple[int, ...], n: int) -> None:
    n = fitting(group, n)
    kind = type(group.random(n, batch, rng()))
    members = strangers = 0
    for g in pool(n, batch):
        taken = isinstance(g, (kind, *SUBGROUPS.get(group.name, ())))
        belongs = taken and is_well_formed(g) and DEFINITIONS[group.name](g.to_dense())
        assert group.contains(g, 1e-9) == belongs, (g, g.to_dense())
        members, strangers = members + belongs, strangers + (not belongs)
    assert min(members, strangers) >= 5


@pytest.mark.parametrize("group", [Permutation(), Signed(), Orthogonal()], ids=lambda g: g.name)
def test_membership_holds_to_within_the_tolerance(group: Group) -> None:
    g = group.random(5, (), rng())
    if isinstance(g, Monomial):
        near: Element = Monomial(g.index, (torch.ones(5) if g.scale is None else g.scale) * (1 + 1e-4))
    else:
        assert isinstance(g, Similarity)
        near = Similarity(g.matrix * (1 + 4e-5))
    assert group.contains(near, 1e-3)
    assert not group.contains(near, 1e-5)


# -- the best element ------------------------------------------------------------------------------


def planted(
    group: Group,
    parts: tuple[str, ...],
    noise: float = 0.0,
    unbalance: float = 1.0,
    n: int = 5,
    batch: int = 3,
) -> tuple[Element, Features]:
    """X = gY for a random g, with noise; the dual side `unbalance` times as large as the primal one."""
    n = fitting(group, n)
    g = group.random(n, (batch,), rng(11))
    features: Features = {}
    for i, part in enumerate(parts):
        y = normal(batch, n, 9, seed=20 + i) * (unbalance if part == "dual" else 1.0)
        x = dense_part(g, part) @ y
        features[part] = (x + noise * normal(batch, n, 9, seed=30 + i) * y.std(), y)
    return g, features


@group_and_parts
def test_objective_is_that_of_the_matrices(group: Group, parts: tuple[str, ...]) -> None:
    n = fitting(group, 5)
    features = {part: (normal(2, 3, n, 4, seed=i), normal(2, 3, n, 4, seed=9 + i)) for i, part in enumerate(parts)}
    g = group.random(n, (2, 3), rng())
    torch.testing.assert_close(objective(g, moments(features)), dense_objective(g, features))


@group_and_parts
def test_norms_are_enough_for_groups_that_say_so(group: Group, parts: tuple[str, ...]) -> None:
    full = moments(planted(group, parts, noise=0.5)[1])
    g = group.best(full)
    if group.gram:
        with pytest.raises(SymmetryError, match="not their diagonals"):
            group.best(norms_alone(full))
    else:
        assert torch.equal(group.best(norms_alone(full)).to_dense(), g.to_dense())
        torch.testing.assert_close(objective(g, norms_alone(full)), objective(g, full))
    with pytest.raises(SymmetryError, match="do not add"):
        full[parts[0]] + norms_alone(full)[parts[0]]


@group_and_parts
def test_a_batch_is_solved_as_its_elements_one_by_one(group: Group, parts: tuple[str, ...]) -> None:
    _, features = planted(group, parts, noise=0.5, unbalance=2.0)
    dense = group.best(moments(features)).to_dense()
    for b in range(3):
        one = group.best(moments({part: (x[b], y[b]) for part, (x, y) in features.items()}))
        assert one.batch == ()
        torch.testing.assert_close(one.to_dense(), dense[b], rtol=1e-9, atol=1e-9)


@group_and_parts
def test_moments_add(group: Group, parts: tuple[str, ...]) -> None:
    """Two tensors on an axis are one with more columns."""
    _, features = planted(group, parts, noise=0.5)
    whole = moments(features)
    left = moments({part: (x[..., :4], y[..., :4]) for part, (x, y) in features.items()})
    right = moments({part: (x[..., 4:], y[..., 4:]) for part, (x, y) in features.items()})
    summed = {part: left[part] + right[part] for part in whole}
    torch.testing.assert_close(group.best(summed).to_dense(), group.best(whole).to_dense(), rtol=1e-6, atol=1e-6)


@group_and_parts
def test_a_planted_element_comes_back(group: Group, parts: tuple[str, ...]) -> None:
    for unbalance in (0.25, 0.5, 1.0, 2.0, 4.0):
        g, features = planted(group, parts, unbalance=unbalance)
        best = group.best(moments(features))
        assert best.batch == (3,)
        torch.testing.assert_close(best.to_dense(), g.to_dense(), rtol=1e-10, atol=1e-10)


@group_and_parts
@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_no_other_element_is_better_than_the_best_under_noise(
    group: Group, parts: tuple[str, ...], noise: float
) -> None:
    g, features = planted(group, parts, noise=noise, unbalance=2.0)
    m = moments(features)
    reached = objective(group.best(m), m) - 1e-9 * size_of(features)
    assert (reached <= objective(g, m)).all()
    for seed in range(30):
        other = group.random(g.size, (3,), rng(seed))
        assert (reached <= objective(other, m)).all()
        assert (reached <= objective(g @ other, m)).all()


@group_and_parts
def test_the_best_is_never_worse_than_the_identity(group: Group, parts: tuple[str, ...]) -> None:
    """On features that have nothing to do with each other, with norms from 10⁻³ to 10³ in any combination."""
    norms = 10.0 ** (6 * torch.rand(4, 200, 1, 1, generator=rng(5), dtype=torch.float64) - 3)
    for n in {fitting(group, 2), fitting(group, 5)}:
        features = {
            part: (
                norms[i] * normal(200, n, 4, seed=i),
                norms[3 - i] * normal(200, n, 4, seed=50 + i) * (1 + 9 * torch.arange(n)[:, None]),
            )
            for i, part in enumerate(parts)
        }
        m = moments(features)
        g = group.best(m)
        assert group.contains(g, 1e-9)
        excess = objective(g, m) - objective(group.identity(n, (200,)), m)
        assert (excess <= 1e-9 * size_of(features)).all(), (excess / size_of(features)).max()


DEGENERATE: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "all zero": lambda x, y: (0 * x, 0 * y),
    "source zero": lambda x, y: (x, 0 * y),
    "anchor zero": lambda x, y: (0 * x, y),
    "rank one": lambda x, y: (x[..., :1] * y[..., :1, :], y[..., :1] * x[..., :1, :]),
    "equal units": lambda x, y: (x[..., :1, :].expand(x.shape), y[..., :1, :].expand(x.shape)),
    "one unit dead": lambda x, y: (x * (torch.arange(x.shape[-2]) > 0)[:, None], y),
    "opposite": lambda x, y: (-y, y + 0 * x),
    "equal": lambda x, y: (y, y + 0 * x),
    "tiny": lambda x, y: (1e-60 * x, 1e-60 * y),
    "huge": lambda x, y: (1e60 * x, 1e60 * y),
    "anchor dwarfs": lambda x, y: (1e30 * x, 1e-30 * y),
    "source dwarfs": lambda x, y: (1e-30 * x, 1e30 * y),
}


@group_and_parts
@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("n", [1, 4])
def test_degenerate_features_give_a_member(group: Group, parts: tuple[str, ...], case: str, n: int) -> None:
    n = fitting(group, n)
    features = {
        part: DEGENERATE[case](normal(2, n, 3, seed=i), normal(2, n, 3, seed=7 + i)) for i, part in enumerate(parts)
    }
    m = moments(features)
    g = group.best(m)
    assert g.batch == (2,)
    assert all(t.isfinite().all() for t in g.tensors().values())
    assert group.contains(g, 1e-9)
    excess = objective(g, m) - objective(group.identity(n, (2,)), m)
    assert (excess <= 1e-9 * size_of(features)).all()


@every_group
def test_one_side_dead_and_the_other_alive(group: Group) -> None:
    """What weight decay leaves of an unused neuron: norms of 10⁻²⁰ on one side, of 1 on the other."""
    n = fitting(group, 4)
    if isinstance(group, Invertible):
        group = replace(group, rtol=1e-9)  # to the end
    for small, large in (("primal", "dual"), ("dual", "primal")):
        features = {small: (1e-20 * normal(2, n, 3), 1e-20 * normal(2, n, 3, seed=1))}
        features |= {large: (normal(2, n, 3, seed=2), normal(2, n, 3, seed=3))}
        m = moments(features)
        alone = {large: m[large]}
        reached, least = objective(group.best(m), alone), objective(group.best(alone), alone)
        # Features of fewer columns than units are met exactly by an invertible map: what is left is rounding.
        atol = 1e-9 * size_of({large: features[large]}).max().item() if isinstance(group, Invertible) else 0
        torch.testing.assert_close(reached, least, rtol=1e-8, atol=atol)


# -- against brute force ---------------------------------------------------------------------------


def pairs(n: int, parts: tuple[str, ...], seed: int, columns: int = 3) -> Features:
    return {
        part: (normal(n, columns, seed=seed + i), 2.0**i * normal(n, columns, seed=seed + 10 + i))
        for i, part in enumerate(parts)
    }


def assert_none_better(group: Group, features: Features, least: float, tol: float = 1e-9) -> None:
    reached = dense_objective(group.best(moments(features)), features).item()
    assert reached <= least + tol * size_of(features).item()


def expanded(m: PartMoments, count: int) -> PartMoments:
    return {part: Moments(*(t.expand(count, *t.shape) for t in (v.xy, v.xx, v.yy))) for part, v in m.items()}


ALL_PARTS = [("primal",), ("dual",), ("plain",), ("primal", "dual"), ("primal", "dual", "plain")]


@pytest.mark.parametrize("parts", ALL_PARTS, ids="+".join)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_permutation_against_all_of_them(parts: tuple[str, ...], n: int) -> None:
    index = torch.tensor(list(itertools.permutations(range(n))))
    for seed in range(5):
        features = pairs(n, parts, 100 * seed)
        values = objective(Monomial(index), expanded(moments(features), len(index)))
        assert_none_better(Permutation(), features, values.min().item())


@pytest.mark.parametrize("parts", ALL_PARTS, ids="+".join)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_signed_permutation_against_all_of_them(parts: tuple[str, ...], n: int) -> None:
    orders = torch.tensor(list(itertools.permutations(range(n))))
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=torch.float64)
    everything = Monomial(orders.repeat_interleave(len(signs), 0), signs.repeat(len(orders), 1))
    for seed in range(5):
        features = pairs(n, parts, 100 * seed)
        values = objective(everything, expanded(moments(features), everything.batch[0]))
        assert_none_better(Signed(), features, values.min().item())


def test_sign_against_both() -> None:
    signs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    found = set()
    for parts in ALL_PARTS:
        for n, seed in itertools.product((1, 2, 5), range(5)):
            features, both = pairs(n, parts, 100 * seed), Monomial(torch.arange(n).expand(2, n), signs.expand(2, n))
            assert_none_better(Sign(), features, objective(both, expanded(moments(features), 2)).min().item())
            found.add(Sign().best(moments(features)).to_dense()[0, 0].item())
    assert found == {-1.0, 1.0}


@pytest.mark.parametrize("group", [Sign(), Signed()], ids=["sign", "signed"])
def test_what_speaks_for_neither_sign_keeps_it(group: Group) -> None:
    """Dead units, whose cross-Gram is zero: none is flipped."""
    none = torch.zeros(2, 4, 4, dtype=torch.float64)
    found = group.best({"primal": Moments(none, none, none)})
    assert isinstance(found, Monomial)
    assert found.scale is None or bool((found.scale == 1).all())


def best_pair(features: Features, i: int, j: int, sign: float = 1.0) -> float:
    """The least cost of putting source unit j in the place of unit i of the anchor, over all scales of that sign."""

    def cost(log_a: float) -> float:
        factor = {"primal": sign * math.exp(log_a), "dual": sign * math.exp(-log_a), "plain": 1.0}
        return sum((x[i] - factor[part] * y[j]).square().sum().item() for part, (x, y) in features.items())

    edge = math.log(LIMIT)
    grid = torch.linspace(-edge, edge, 61).tolist()
    starts = sorted(grid, key=cost)[:1] + [
        u for low, u, high in zip(grid, grid[1:], grid[2:], strict=False) if cost(u) <= min(cost(low), cost(high))
    ]
    step = grid[1] - grid[0]
    return min(
        minimize_scalar(
            cost,
            bounds=(max(u - step, -edge), min(u + step, edge)),
            method="bounded",
            options={"xatol": 1e-9},
        ).fun
        for u in starts
    )


@pytest.mark.parametrize("parts", [p for p in ALL_PARTS if p != ("plain",)], ids="+".join)
@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 100), (3, 200), (4, 300), (5, 400)])
def test_positive_monomial_against_all_permutations(parts: tuple[str, ...], n: int, seed: int) -> None:
    features = pairs(n, parts, seed)
    costs = [[best_pair(features, i, j) for j in range(n)] for i in range(n)]
    least = min(sum(costs[i][j] for i, j in enumerate(order)) for order in itertools.permutations(range(n)))
    assert_none_better(PositiveMonomial(), features, least)


@pytest.mark.parametrize("parts", [p for p in ALL_PARTS if p != ("plain",)], ids="+".join)
@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 100), (3, 200), (4, 300)])
def test_signed_monomial_against_all_permutations_and_signs(parts: tuple[str, ...], n: int, seed: int) -> None:
    features = pairs(n, parts, seed)
    costs = {(i, j, sign): best_pair(features, i, j, sign) for i in range(n) for j in range(n) for sign in (-1.0, 1.0)}
    least = min(
        sum(costs[i, j, sign] for i, (j, sign) in enumerate(zip(order, signs, strict=True)))
        for order in itertools.permutations(range(n))
        for signs in itertools.product((-1.0, 1.0), repeat=n)
    )
    assert_none_better(SignedMonomial(), features, least)


GATED = ("primal", "dual", "plain")
QUICK = SignedMonomial(largest_exact=0)


@pytest.mark.parametrize("unbalance", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("parts", [*part_sets(SignedMonomial()), ("plain",)], ids="+".join)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_quick_way_of_many_units_is_exact_on_related_ones(
    parts: tuple[str, ...], unbalance: float, noise: float
) -> None:
    g, features = planted(SignedMonomial(), parts, noise=noise, unbalance=unbalance, n=40)
    quick, exact = (group.best(moments(features)) for group in (QUICK, SignedMonomial()))
    assert torch.equal(quick.to_dense(), exact.to_dense())
    if noise == 0 and parts != ("plain",):
        torch.testing.assert_close(quick.to_dense(), g.to_dense())


@pytest.mark.parametrize("unbalance", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("noise", [1.0, 3.0, math.inf])
def test_how_far_the_quick_way_of_many_units_falls_short(noise: float, unbalance: float) -> None:
    """Of what the exact one gains over the identity: nearly nothing on related units, little on unrelated ones."""
    n = 60
    if noise == math.inf:
        features: Features = {
            part: (normal(3, n, 20, seed=i), unbalance**i * normal(3, n, 20, seed=9 + i))
            for i, part in enumerate(GATED)
        }
    else:
        _, features = planted(SignedMonomial(), GATED, noise=noise, unbalance=unbalance, n=n)
    m = moments(features)
    start, quick, exact = (objective(g, m) for g in (QUICK.identity(n, (3,)), QUICK.best(m), SignedMonomial().best(m)))
    short = (quick - exact) / (start - exact)
    assert (short >= -1e-12).all()
    assert (short <= (0.001 if noise == 1 else 0.02)).all()


@pytest.mark.parametrize("parts", [("primal",), ("dual",), ("primal", "dual")], ids="+".join)
@pytest.mark.parametrize("seed", [0, 100])
def test_scaling_against_a_search(parts: tuple[str, ...], seed: int) -> None:
    features = pairs(4, parts, seed)
    assert_none_better(Scaling(), features, sum(best_pair(features, i, i) for i in range(4)))


def plane(angles: Tensor, reflections: bool = True) -> Similarity:
    """All rotations by these angles, then all reflections."""
    c, s = angles.cos(), angles.sin()
    turn = torch.stack((torch.stack((c, -s), -1), torch.stack((s, c), -1)), -2)
    return Similarity(
        turn if not reflections else torch.cat((turn, turn * torch.tensor([1.0, -1.0], dtype=torch.float64)))
    )


ANGLES = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)[:-1]


@pytest.mark.parametrize("parts", [("primal",), ("dual",), ("primal", "dual")], ids="+".join)
def test_orthogonal_against_all_angles(parts: tuple[str, ...]) -> None:
    circle = plane(ANGLES)
    determinants = set()
    for seed in range(10):
        features = pairs(2, parts, 100 * seed)
        values = objective(circle, expanded(moments(features), circle.batch[0]))
        assert_none_better(Orthogonal(), features, values.min().item())
        determinants.add(round(torch.linalg.det(Orthogonal().best(moments(features)).to_dense()).item()))
    assert determinants == {-1, 1}, "both rotations and reflections must have been the answer"


@pytest.mark.parametrize("parts", [("primal",), ("dual",), ("primal", "dual")], ids="+".join)
def test_phase_against_all_angles(parts: tuple[str, ...]) -> None:
    circle = plane(ANGLES, reflections=False)
    for seed in range(10):
        features = pairs(2, parts, 100 * seed)
        values = objective(circle, expanded(moments(features), circle.batch[0]))
        assert_none_better(Phase(), features, values.min().item())
        reached = objective(Phase().best(moments(features)), moments(features)).item()
        assert abs(reached - values.min().item()) <= 1e-6 * size_of(features).item()


def conformal_search(features: Features, reflections: bool = True) -> float:
    """The least objective over angles and scales: a grid, then finer ones about its lowest point."""
    m = moments(features)
    centre, spread = None, (math.pi, math.log(LIMIT))
    least = math.inf
    for count in (120, 40, 40, 40):
        unit = torch.linspace(-1, 1, count + 1, dtype=torch.float64)
        turn, logs = (0.0 if centre is None else centre[0]) + spread[0] * unit, spread[1] * unit
        logs = (logs + (0.0 if centre is None else centre[1])).clamp(-math.log(LIMIT), math.log(LIMIT))
        circle = plane(turn, reflections)
        matrix = circle.matrix.repeat_interleave(len(logs), 0)
        grid = Similarity(matrix, logs.exp().repeat(circle.batch[0]))
        values = objective(grid, expanded(m, grid.batch[0]))
        at = int(values.argmin())
        least = min(least, values[at].item())
        centre = (turn[(at // len(logs)) % len(turn)].item(), logs[at % len(logs)].item())
        spread = (4 * spread[0] / count, 4 * spread[1] / count)
    return least


# What is claimed for conformal maps: rotation and scale together are not a convex problem. On features that
# an element does relate, whatever the balance of their norms, the best is the global optimum. On unrelated
# ones the rotation is the best for its scale and the scale the best for its rotation (a stationary point, not
# always the lowest): lower than the paper's one pass on average, in a few of a hundred tiny heads a little higher.
# All to within the group's own tolerance, a share of |X|² + |Y|².
WITHIN = 10 * Conformal().rtol


@pytest.mark.parametrize("unbalance", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("parts", [("primal",), ("dual",), ("primal", "dual")], ids="+".join)
def test_conformal_against_all_angles_and_scales(parts: tuple[str, ...], unbalance: float) -> None:
    _, features = planted(Conformal(), parts, noise=0.4, unbalance=unbalance, n=2, batch=4)
    for b in range(4):
        one = {part: (x[b], y[b]) for part, (x, y) in features.items()}
        assert_none_better(Conformal(), one, conformal_search(one), tol=WITHIN)


@pytest.mark.parametrize("unbalance", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("parts", [("primal",), ("dual",), ("primal", "dual")], ids="+".join)
def test_rotary_against_all_angles_and_scales(parts: tuple[str, ...], unbalance: float) -> None:
    """The global optimum, of related and of unrelated planes."""
    for seed in range(10):
        features = pairs(2, parts, 100 * seed)
        features = {part: (x, unbalance * y if part == "dual" else y) for part, (x, y) in features.items()}
        assert_none_better(Rotary(), features, conformal_search(features, reflections=False))
    _, related = planted(Rotary(), parts, noise=0.4, unbalance=unbalance, batch=4)
    for b in range(4):
        one = {part: (x[b], y[b]) for part, (x, y) in related.items()}
        assert_none_better(Rotary(), one, conformal_search(one, reflections=False))


@pytest.mark.parametrize("unbalance", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("n", [2, 8])
def test_conformal_on_unrelated_features_is_stationary(n: int, unbalance: float) -> None:
    features = {
        "primal": (normal(200, n, 6, seed=1), normal(200, n, 6, seed=2)),
        "dual": (normal(200, n, 6, seed=3), unbalance * normal(200, n, 6, seed=4)),
    }
    m = moments(features)
    g = Conformal().best(m)
    a = g.scale[:, None, None]
    pulled = g.matrix.mT @ (a * m["primal"].xy + m["dual"].xy / a)  # symmetric where no rotation helps
    size = size_of(features)
    assert ((pulled - pulled.mT).flatten(1).norm(dim=1) <= 1e-3 * size).all()
    for step in (1 - 1e-3, 1 + 1e-3):
        nearby = Similarity(g.matrix, g.scale * step)
        assert (objective(g, m) <= objective(nearby, m) + WITHIN * size).all()
    u, _, vt = torch.linalg.svd(a * m["primal"].xy + m["dual"].xy / a)
    assert (objective(g, m) <= objective(Similarity(u @ vt, g.scale), m) + WITHIN * size).all()


@pytest.mark.parametrize("noise", [0.0, 0.5, math.inf])
@pytest.mark.parametrize("unbalance", [0.25, 1.0, 4.0])
def test_conformal_against_one_pass(noise: float, unbalance: float) -> None:
    if noise == math.inf:
        features: Features = {
            part: (normal(100, 8, 12, seed=i), unbalance**i * normal(100, 8, 12, seed=9 + i))
            for i, part in enumerate(("primal", "dual"))
        }
    else:
        _, features = planted(Conformal(), ("primal", "dual"), noise, unbalance, n=8, batch=100)
    m = moments(features)
    both, once = (objective(group.best(m), m) for group in (Conformal(), Conformal(one_pass=True)))
    worse = both > once + WITHIN * size_of(features)
    assert not worse.any() or (noise == math.inf and worse.double().mean() <= 0.03)
    assert both.sum() <= once.sum() + WITHIN * size_of(features).sum()
    if noise > 0 and unbalance != 1.0:
        strictly = (once - both) / once > 1e-6
        assert strictly.double().mean() > 0.9


def test_the_trap_of_rotation_then_scale() -> None:
    """Queries 4 times as large and keys 4 times as small as the anchor's: a rotation found before the scale
    follows the queries alone, and a share of the distance stays that turning and scaling in turns removes."""
    features = {
        "primal": (normal(50, 8, 20, seed=1), 4 * normal(50, 8, 20, seed=2)),
        "dual": (normal(50, 8, 20, seed=3), normal(50, 8, 20, seed=4) / 4),
    }
    m = moments(features)
    rotated, once, both = (
        objective(group.best(m), m).sum().item() for group in (Orthogonal(), Conformal(one_pass=True), Conformal())
    )
    assert both < 0.95 * once < once < 0.5 * rotated
