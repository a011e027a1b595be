"""Which head belongs to which: against all permutations, each pair at its best inner elements found by hand."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from contract.tiny import MODELS
from symfuse.groups import GROUPS, Centred, Element, Group, Moments, Monomial, Permutation, objective
from symfuse.matching.heads import match_outer
from symfuse.model import Model
from symfuse.spec import Axis, Instance, Spec, expand

H, D, WIDTH = 4, 5, 20  # heads, their size, and the hidden size of the tiny BERT
LAYER = "encoder.layer.0.attention"
KEY_BIAS = (f"{LAYER}.self.key.bias", "qk*")


def parts(model: Model) -> dict[str, Tensor]:
    """[head, size, features] of what a head of layer 0 reads and writes, sliced by hand."""
    read = {kind: model.read(f"{LAYER}.self.{kind}.weight").reshape(H, D, WIDTH) for kind in ("query", "key", "value")}
    bias = {kind: model.read(f"{LAYER}.self.{kind}.bias").reshape(H, D, 1) for kind in ("query", "key", "value")}
    out = model.read(f"{LAYER}.output.dense.weight").reshape(WIDTH, H, D).permute(1, 2, 0)
    return (
        {f"{kind} weight": t for kind, t in read.items()}
        | {f"{kind} bias": t for kind, t in bias.items()}
        | {"out": out}
    )


QK = ("query weight", "query bias", "key weight", "key bias")
V = ("value weight", "value bias", "out")


def scores(anchor: Model, source: Model, rotated: Collection[str], skip: Collection[str] = ()) -> Tensor:
    """Of every pair of heads the largest inner product: by an SVD for what may be rotated, as it is for the rest."""
    xs, ys = parts(anchor), parts(source)
    table = torch.zeros(H, H, dtype=torch.float64)
    for i, j in itertools.product(range(H), range(H)):
        for axis, names in (("qk", QK), ("v", V)):
            c = sum((xs[n][i] @ ys[n][j].T for n in names if n not in skip), torch.zeros(D, D, dtype=torch.float64))
            table[i, j] += torch.linalg.svd(c).S.sum() if axis in rotated else torch.trace(c)
    return table


def best_permutation(table: Tensor) -> list[int]:
    found = itertools.permutations(range(len(table)))
    return list(max(found, key=lambda p: sum(float(table[i, j]) for i, j in enumerate(p))))


def index_of(element: Element) -> list[int]:
    assert isinstance(element, Monomial)
    assert element.scale is None
    return [int(i) for i in element.index]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("inner", [(), ("qk",), ("v",), ("qk", "v")], ids=str)
@pytest.mark.parametrize("skip", [(), (KEY_BIAS,)], ids=["all", "without key biases"])
def test_heads_against_all_permutations(seed: int, inner: tuple[str, ...], skip: tuple[tuple[str, str], ...]) -> None:
    anchor, source = (Model.of(MODELS["bert"](seed=s)) for s in (seed, 100 + seed))
    spec = source.spec
    instances = [Instance(axis, (0,)) for axis in inner]
    groups = {i: group for i in instances if (group := spec.axes[i.axis].group) is not None}
    tensors = {name: source.read(name) for name in spec.tensors}
    found = match_outer(spec, Instance("h", (0,)), instances, anchor.read, tensors, groups, skip)
    table = scores(anchor, source, inner, ("key bias",) if skip else ())
    assert index_of(found) == best_permutation(table)


@pytest.mark.parametrize("missing", [f"{LAYER}.output.dense.weight", f"{LAYER}.self.query.weight"])
def test_only_tensors_that_both_have_count(missing: str) -> None:
    anchor, source = (Model.of(MODELS["bert"](seed=s)) for s in (0, 7))
    spec = source.spec
    instances = [Instance("qk", (0,)), Instance("v", (0,))]
    groups = {i: group for i in instances if (group := spec.axes[i.axis].group) is not None}
    tensors = {name: source.read(name) for name in spec.tensors if name != missing}
    found = match_outer(spec, Instance("h", (0,)), instances, anchor.read, tensors, groups, ())
    skip = "out" if "output" in missing else "query weight"
    assert index_of(found) == best_permutation(scores(anchor, source, ("qk", "v"), (skip,)))


def test_what_has_no_inner_axis_counts_as_it_is() -> None:
    """A number for each head, and neurons inside of heads that are permuted."""
    axes = {"h": Axis(4, Permutation()), "n": Axis(3, Permutation(), per=("h",)), "k": Axis(5)}
    spec = Spec("toy", axes, expand({"gate": "h", "inside": "(h n) k", "mixed": "k h"}, axes))
    rng = torch.Generator().manual_seed(1)
    x, y = (
        {name: torch.randn(*shape, generator=rng, dtype=torch.float64) for name, shape in SHAPES.items()}
        for _ in range(2)
    )
    found = match_outer(spec, Instance("h"), [Instance("n")], x.__getitem__, y, {Instance("n"): Permutation()}, ())
    table = torch.outer(x["gate"], y["gate"]) + x["mixed"].T @ y["mixed"]
    one, other = (t["inside"].reshape(4, 3, 5) for t in (x, y))
    for i, j in itertools.product(range(4), range(4)):
        c = one[i] @ other[j].T
        table[i, j] += max(sum(c[a, b] for a, b in enumerate(p)) for p in itertools.permutations(range(3)))
    assert index_of(found) == best_permutation(table)


SHAPES = {"gate": (4,), "inside": (12, 5), "mixed": (5, 4)}


# What each group can reach at most of ⟨g, C⟩ with elements that keep norms, by enumeration or from the theory.


def by_permutations(c: Tensor) -> float:
    n = range(len(c))
    return max(float(sum(c[i, p[i]] for i in n)) for p in itertools.permutations(n))


def by_svd(c: Tensor) -> float:
    return float(torch.linalg.svd(c).S.sum())


def on_the_complement_of_ones(c: Tensor) -> float:
    """|1ᵀ C 1| / n, and the rotations of what is orthogonal to the ones."""
    n = len(c)
    basis = torch.linalg.qr(torch.cat([torch.ones(n, 1), torch.eye(n)[:, 1:]], 1).double()).Q[:, 1:]
    return abs(float(c.sum())) / n + by_svd(basis.T @ c @ basis)


def by_angles(c: Tensor) -> float:
    """Of 2 × 2 matrices, at a hundred thousand angles."""
    angle = torch.linspace(0, 2 * torch.pi, 100_001, dtype=torch.float64)
    along, across = c[0, 0] + c[1, 1], c[1, 0] - c[0, 1]
    return float((angle.cos() * along + angle.sin() * across).max())


REACHED = {
    "permutation": by_permutations,
    "sign": lambda c: abs(float(torch.trace(c))),
    "signed": lambda c: by_permutations(c.abs()),
    "signed-monomial": lambda c: by_permutations(c.abs()),
    "scaling": lambda c: float(torch.trace(c)),
    "monomial": by_permutations,
    "orthogonal": by_svd,
    "centred": on_the_complement_of_ones,
    "conformal": by_svd,
    "invertible": by_svd,
    "phase": by_angles,
    "rotary": by_angles,
}


def test_every_group_is_here() -> None:
    assert REACHED.keys() == GROUPS.keys()


@pytest.mark.parametrize("name", GROUPS)
def test_reach_is_the_largest_inner_product(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    n = GROUPS[name].size or 4
    c = torch.randn(3, 2, n, n, generator=rng, dtype=torch.float64)
    expected = torch.tensor([[REACHED[name](one) for one in row] for row in c], dtype=torch.float64)
    torch.testing.assert_close(GROUPS[name].reach(c), expected)


@pytest.mark.parametrize("name", GROUPS)
def test_no_element_that_keeps_norms_reaches_more(name: str) -> None:
    group = GROUPS[name].without_scaling()
    rng = torch.Generator().manual_seed(1)
    n = group.size or 4
    c = torch.randn(n, n, generator=rng, dtype=torch.float64)
    reach = float(GROUPS[name].reach(c[None])[0])
    for _ in range(50):
        element = group.random(n, (), rng)
        if bool(((element.to_dense() @ element.to_dense().T - torch.eye(n)).abs() < 1e-9).all()):
            assert float(element.inner(c)) <= reach + 1e-9
    # A pair of one and the same thing is worth its squared norm, and no other pair more.
    x = torch.randn(n, 30, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(GROUPS[name].reach((x @ x.T)[None]), x.square().sum()[None])


@pytest.mark.parametrize(
    "group", [Permutation(), GROUPS["signed"], GROUPS["orthogonal"], Centred()], ids=lambda g: g.name
)
def test_reach_agrees_with_best(group: Group) -> None:
    """Where elements keep norms, the least distance is |x|² + |y|² − 2 reach."""
    rng = torch.Generator().manual_seed(2)
    x, y = (torch.randn(5, 4, 9, generator=rng, dtype=torch.float64) for _ in range(2))
    moments = Moments(x @ y.mT, x.square().sum(-1), y.square().sum(-1))
    least = objective(group.best({"primal": moments}), {"primal": moments})
    torch.testing.assert_close(least, moments.size - 2 * group.reach(moments.xy), rtol=1e-6, atol=1e-6)
