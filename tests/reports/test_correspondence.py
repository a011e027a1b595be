"""Which unit became which, and how far heads are turned."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.groups import Linear, Monomial, Orthogonal, Permutation, Similarity
from symfuse.reports.correspondence import Reordering, angles, bins, correspondence
from symfuse.spec import Instance


def rotation(degrees: float) -> torch.Tensor:
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])


def test_angles_are_those_of_the_planes() -> None:
    planes = torch.block_diag(rotation(30), rotation(-90), torch.eye(2, dtype=torch.float64))
    found = angles(torch.stack([torch.eye(6, dtype=torch.float64), planes, -torch.eye(6, dtype=torch.float64)]))
    torch.testing.assert_close(found, torch.tensor([0.0, 40.0, 180.0], dtype=torch.float64))
    basis, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(angles(basis @ planes @ basis.T), found[1])


def test_a_picture_has_every_unit_once() -> None:
    index = torch.randperm(29, generator=torch.Generator().manual_seed(0))
    one = Reordering("ffn", "layer 0", index)
    exact = one.density(29)
    assert torch.equal(exact.nonzero()[:, 1], index)
    for side in (1, 5, 7, 28):
        density = one.density(side)
        edges = [-(-k * 29 // side) for k in range(side + 1)]
        slices = [slice(a, b) for a, b in pairwise(edges)]
        expected = torch.tensor([[exact[down, across].sum() for across in slices] for down in slices])
        assert torch.equal(density, expected)


def test_pictures_have_a_bounded_number_of_cells() -> None:
    big = tuple(Reordering("ffn", f"layer {i}", torch.arange(11008)) for i in range(32))
    assert bins(big[:1]) == 128
    assert bins(big) ** 2 * 32 <= 80_000
    assert bins((Reordering("h", "layer 0", torch.arange(12)),)) == 12


def test_of_an_alignment(alignment: Alignment) -> None:
    planted = random_alignment(alignment.spec, 0, axes=("h", "ffn", "v"))
    elements = {i: g for i, g in planted.elements.items() if i != Instance("ffn", (0,))}
    found = correspondence(replace(planted, elements=elements), "file")
    assert (found.source, found.anchor) == ("file source", "file anchor")
    assert set(found.reorderings) == {"h", "ffn"}
    rest, moved = found.reorderings["ffn"]  # what is absent is at rest
    assert (rest.place, rest.moved, rest.size) == ("layer 0", 0, 29)
    element = planted.elements[Instance("ffn", (1,))]
    assert isinstance(element, Monomial)
    assert torch.equal(moved.index, element.index)
    assert not torch.equal(moved.index[moved.index], torch.arange(29))  # its inverse is another
    assert moved.moved == int((element.index != torch.arange(29)).sum()) > 0
    turns = found.turns["v"]
    assert [(turn.layer, turn.at) for turn in turns] == [(layer, str(head)) for layer in (0, 1) for head in range(4)]
    for turn in turns:
        tensors = planted.elements[Instance("v", (turn.layer,))].tensors()
        assert turn.degrees == pytest.approx(angles(tensors["matrix"][int(turn.at)]).item())
        assert turn.scale == pytest.approx(tensors["scale"][int(turn.at)].item())


@pytest.mark.parametrize("group", ["invertible", "permutation"])
def test_what_is_absent_is_at_rest_in_the_kind_of_its_axis(group: str) -> None:
    from contract.tiny import MODELS

    source, anchor = (MODELS["bert"](seed) for seed in (0, 1))
    found = correspondence(api.match(source, anchor, axes="attention", groups={"attention": group}, layers="0"))
    shown, other = (found.reorderings, found.turns) if group == "permutation" else (found.turns, found.reorderings)
    assert set(shown) == {"qk", "v"}
    assert not other
    if group == "permutation":
        for orders in found.reorderings.values():
            moved = [(order.place.split(",")[0], order.moved > 0) for order in orders]
            assert moved == [("layer 0", True)] * 4 + [("layer 1", False)] * 4
    for turns in found.turns.values():
        assert [turn.layer for turn in turns] == [0] * 4 + [1] * 4
        assert all(turn.degrees > 1 and turn.condition > 1.01 for turn in turns[:4])
        assert all((turn.degrees, turn.scale, turn.condition) == (0, 1, 1) for turn in turns[4:])


def test_of_an_invertible_map_the_rotation_is_its_polar_factor(alignment: Alignment) -> None:
    spec, rng = alignment.spec, torch.Generator().manual_seed(0)
    size, batch = spec.axes["v"].size, spec.batch("v")
    turned = Orthogonal().random(size, batch, rng).matrix
    stretch = torch.diag(torch.linspace(1, 3, size, dtype=torch.float64))
    basis = Orthogonal().random(size, (), rng).matrix
    symmetric = basis @ stretch @ basis.mT
    element = Linear(turned @ symmetric, torch.linalg.inv(turned @ symmetric))
    orders = Permutation().random(size, batch, rng)
    elements = {Instance("v", (0,)): element, Instance("v", (1,)): orders}  # of two kinds: all as turns
    found = correspondence(replace(alignment, elements=elements))
    assert not found.reorderings
    turns = found.turns["v"]
    assert [turn.degrees for turn in turns[:4]] == pytest.approx(angles(turned).tolist())
    assert [turn.condition for turn in turns[:4]] == pytest.approx([3.0] * 4)
    mean = float(torch.linspace(1, 3, size, dtype=torch.float64).log().mean().exp())
    assert [turn.scale for turn in turns[:4]] == pytest.approx([mean] * 4)
    assert [turn.degrees for turn in turns[4:]] == pytest.approx(angles(orders.to_dense()).tolist())
    similar = Similarity(turned, torch.full(batch, 2.0, dtype=torch.float64))
    (one, other) = (
        correspondence(replace(alignment, elements={Instance("v", (0,)): g})).turns["v"]
        for g in (similar, Linear(similar.to_dense(), similar.inverse().to_dense()))
    )
    for a, b in zip(one, other, strict=True):  # the same map in two forms
        assert (a.degrees, a.scale, a.condition) == pytest.approx((b.degrees, b.scale, b.condition))
        assert a.is_similarity
        assert b.is_similarity


def test_names_come_from_the_provenance(alignment: Alignment) -> None:
    found = correspondence(alignment)
    assert (found.source, found.anchor) == (
        alignment.provenance["source"]["name"],
        alignment.provenance["anchor"]["name"],
    )
