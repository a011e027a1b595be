"""Alignments of small made-up declarations: the wreath law, translations, files, dtypes, laziness."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, SpecError, SymmetryError
from symfuse.groups import (
    Conformal,
    Invertible,
    Monomial,
    Orthogonal,
    Permutation,
    PositiveMonomial,
    Scaling,
    Signed,
    Similarity,
)
from symfuse.io import Checkpoint, TensorInfo
from symfuse.spec import Axis, Instance, Shift, Spec, expand

# Sizes are pairwise distinct, so that no two axes can be mistaken for each other. Nested: x and y in h in l;
# z in q in kv in l.
AXES = {
    "l": Axis(2),
    "vocab": Axis(17),
    "res": Axis(7, Signed()),
    "h": Axis(3, Permutation(), per=("l",)),
    "x": Axis(4, Conformal(), per=("l", "h")),
    "y": Axis(5, PositiveMonomial(), per=("l", "h")),
    "kv": Axis(6, Permutation(), per=("l",)),
    "q": Axis(8, Permutation(), per=("l", "kv")),
    "z": Axis(2, Orthogonal(), per=("l", "kv", "q")),
    "u": Axis(9, Scaling()),
}
TENSORS = {
    "embed": "vocab res",
    "{l}.fused": "res* (h x + h x* + h y + 3)",
    "{l}.fused.bias": "(h x + h x* + h y + 3)",
    "{l}.interleaved": "(h (x + y + 1)) res*",
    "{l}.out": "res (h y*)",
    "{l}.out.bias": "res",
    "{l}.norm": "|res|",
    "{l}.twice": "h x x*",
    "{l}.both": "res res*",
    "{l}.grouped": "(kv q z) res*",
    "{l}.grouped.bias": "kv (q z*)",
    "{l}.turned": "res (q z kv)",
    "{l}.mixed": "(kv + h) u*",
    "{l}.gate": "(h |y|) u",
}
SHIFTS = tuple(
    rule.at({"l": i})
    for i in range(2)
    for rule in (
        Shift("{l}.fused.bias", "x*"),
        Shift("{l}.fused.bias", "y", "{l}.out", "{l}.out.bias"),
        Shift("{l}.grouped.bias", "z*"),
    )
)
SPEC = Spec("made-up", AXES, expand(TENSORS, AXES), shifts=SHIFTS)


def weights(spec: Spec = SPEC, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        spec.file_name(name): torch.randn(d.layout.shape(spec.sizes), generator=rng, dtype=torch.float64).to(dtype)
        for name, d in spec.tensors.items()
    }


def checkpoint(tensors: Mapping[str, Tensor]) -> Checkpoint:
    return Checkpoint(tensors, {"model_type": "made-up"}, name="source")


def moved_by(*alignments: Alignment) -> dict[str, Tensor]:
    """The made-up weights, moved by one alignment after the other."""
    w = checkpoint(weights())
    for alignment in alignments:
        w = alignment(w)
    return dict(w)


def linear(alignment: Alignment) -> Alignment:
    return replace(alignment, shifts={})


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(one), dict(other), rtol=1e-12, atol=1e-12)


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest relative difference of any tensor."""
    return max(((w - other[name]).norm() / other[name].norm()).item() for name, w in one.items())


# -- the action of one element -------------------------------------------------------------------


def only_moving(name: str, *axes: str, seed: int = 1) -> tuple[Tensor, Tensor, Callable[[str], Tensor]]:
    """A tensor, what it moves to, and the dense element of each axis in the first layer."""
    alignment = random_alignment(SPEC, seed, axes)
    w = weights()[name]

    def dense(axis: str) -> Tensor:
        return alignment.elements[SPEC.instance(axis, {"l": 0})].to_dense()

    return w, alignment.move(name, w), dense


def test_an_axis_acts_along_its_dimension() -> None:
    w, moved, g = only_moving("embed", "res")
    torch.testing.assert_close(moved, w @ g("res").mT)


def test_an_axis_twice_acts_on_both_dimensions() -> None:
    w, moved, g = only_moving("0.both", "res")
    torch.testing.assert_close(moved, g("res") @ w @ torch.linalg.inv(g("res")))


def test_an_inner_axis_twice_acts_on_both_dimensions() -> None:
    w, moved, g = only_moving("0.twice", "x")
    torch.testing.assert_close(moved, g("x") @ w @ torch.linalg.inv(g("x")))


def test_the_inside_acts_first_then_the_outside_carries_it_along() -> None:
    w, moved, g = only_moving("0.twice", "x", "h")
    inside = g("x") @ w @ torch.linalg.inv(g("x"))
    torch.testing.assert_close(moved, torch.einsum("ij,jab->iab", g("h"), inside))


def test_three_levels() -> None:
    w, moved, g = only_moving("0.grouped", "z", "q", "kv")
    w = w.reshape(6, 8, 2, 7)
    w = torch.einsum("kqab,kqbr->kqar", g("z"), w)
    w = torch.einsum("kqp,kpar->kqar", g("q"), w)
    w = torch.einsum("kj,jqar->kqar", g("kv"), w)
    torch.testing.assert_close(moved, w.reshape(-1, 7))


def test_batch_dimensions_may_stand_anywhere_in_the_layout() -> None:
    w, moved, g = only_moving("0.turned", "z", "q", "kv")
    w = w.reshape(7, 8, 2, 6)
    w = torch.einsum("kqab,rqbk->rqak", g("z"), w)
    w = torch.einsum("kqp,rpak->rqak", g("q"), w)
    w = torch.einsum("kj,rqaj->rqak", g("kv"), w)
    torch.testing.assert_close(moved, w.reshape(7, -1))


def test_parts_of_a_concatenation_move_by_themselves() -> None:
    w, moved, g = only_moving("0.fused.bias", "x", "y")
    q, k, v, rest = w.split([12, 12, 15, 3])
    expected = [
        (g("x") @ q.reshape(3, 4, 1)).reshape(-1),
        (torch.linalg.inv(g("x")).mT @ k.reshape(3, 4, 1)).reshape(-1),
        (g("y") @ v.reshape(3, 5, 1)).reshape(-1),
        rest,
    ]
    torch.testing.assert_close(moved, torch.cat(expected))


def test_the_permutation_part_moves_gains_and_gates() -> None:
    w, moved, g = only_moving("0.norm", "res")
    assert torch.equal(moved, g("res").abs() @ w)
    w, moved, g = only_moving("0.gate", "y")
    assert torch.equal(moved, ((g("y") != 0).double() @ w.reshape(3, 5, 9)).reshape(15, 9))


def test_a_rotation_is_refused_where_only_a_permutation_part_may_act() -> None:
    spec = replace(SPEC, axes=AXES | {"res": Axis(7, Orthogonal())})
    alignment = random_alignment(spec, 0, ["res"])
    with pytest.raises(SymmetryError, match="no permutation part"):
        alignment.move("0.norm", weights()["0.norm"])


# -- the wreath law --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_composition_acts_as_one_after_the_other(seed: int) -> None:
    g, h = random_alignment(SPEC, seed), random_alignment(SPEC, seed + 50)
    expected = moved_by(g, h)
    assert distance(expected, weights()) > 0.5
    assert_same(moved_by(h @ g), expected)
    assert distance(moved_by(g @ h), expected) > 0.5, "the order matters"


@pytest.mark.parametrize("seed", range(3))
def test_the_inverse_undoes(seed: int) -> None:
    w = weights()
    g = random_alignment(SPEC, seed)
    back = g.inverse()
    assert distance(moved_by(g), w) > 0.5
    for undone in (moved_by(g, back), moved_by(back, g), moved_by(back @ g), moved_by(g @ back)):
        assert_same(undone, w)
    assert_same(moved_by(back.inverse()), moved_by(g))


def test_composition_is_associative_and_reverses_under_inversion() -> None:
    a, b, c = (random_alignment(SPEC, seed) for seed in (1, 2, 3))
    expected = moved_by(a, b, c)
    assert_same(moved_by(c @ (b @ a)), expected)
    assert_same(moved_by((c @ b) @ a), expected)
    assert_same(moved_by((b @ a).inverse()), moved_by(a.inverse() @ b.inverse()))


def test_partial_alignments_compose_with_the_identity_where_nothing_is_said() -> None:
    """Inner elements meet outer permutations that only one of the two alignments has."""
    inner, outer = random_alignment(SPEC, 1, ["x", "z", "res"]), random_alignment(SPEC, 2, ["h", "kv", "q"])
    assert_same(moved_by(outer @ inner), moved_by(inner, outer))
    assert_same(moved_by(inner @ outer), moved_by(outer, inner))
    empty = Alignment(SPEC, {})
    assert_same(moved_by(empty), weights())
    assert_same(moved_by(inner @ empty), moved_by(inner))
    assert_same(moved_by(empty @ inner), moved_by(inner))


@pytest.mark.parametrize(("outer", "name"), [("h", "0.twice"), ("kv", "0.grouped"), ("q", "0.grouped")])
def test_the_inverse_axis_by_axis_is_wrong(outer: str, name: str) -> None:
    """Must fail: inner elements that are not carried along by the outer permutation meet the wrong units."""
    inner = "x" if outer == "h" else "z"
    g = linear(random_alignment(SPEC, 4, [outer, inner]))
    assert not g.elements[Instance(outer, (0,))].is_identity()
    w = weights()[name]
    naive = replace(g, elements={i: e.inverse() for i, e in g.elements.items()})
    wrong = naive.move(name, g.move(name, w))
    torch.testing.assert_close(g.inverse().move(name, g.move(name, w)), w)
    assert ((wrong - w).norm() / w.norm()).item() > 0.3


@pytest.mark.parametrize(("outer", "name"), [("h", "0.twice"), ("kv", "0.grouped"), ("q", "0.grouped")])
def test_the_product_axis_by_axis_is_wrong(outer: str, name: str) -> None:
    inner = "x" if outer == "h" else "z"
    g, h = (linear(random_alignment(SPEC, seed, [outer, inner])) for seed in (4, 6))
    assert not g.elements[Instance(outer, (0,))].is_identity()
    w = weights()[name]
    naive = replace(g, elements={i: h.elements[i] @ e for i, e in g.elements.items()})
    expected = h.move(name, g.move(name, w))
    torch.testing.assert_close((h @ g).move(name, w), expected)
    assert ((naive.move(name, w) - expected).norm() / expected.norm()).item() > 0.3


def test_alignments_of_other_axes_are_not_composed() -> None:
    other = replace(SPEC, axes=AXES | {"u": Axis(10, Scaling())})
    fewer = replace(SPEC, axes={name: axis for name, axis in AXES.items() if name != "u"})
    for spec in (other, fewer):
        with pytest.raises(
            IncompatibleError, match=r"axis 'u' is (of size 10|absent) .*and (of size 9|absent)|axis 'u' is absent here"
        ):
            Alignment(spec, {}) @ Alignment(SPEC, {})


def test_elements_of_different_kinds_are_composed() -> None:
    res, w = Instance("res"), weights()
    kinds = [g.random(7, (), torch.Generator()) for g in (Orthogonal(), Permutation(), Scaling(), Invertible())]
    for then, first in itertools.permutations([Alignment(SPEC, {res: element}) for element in kinds], 2):
        together = then @ first
        for name in ("embed", "0.out.bias", "0.fused"):
            in_turn = then.move(name, first.move(name, w[name]))
            torch.testing.assert_close(together.move(name, w[name]), in_turn, rtol=0, atol=1e-12)


# -- translations ----------------------------------------------------------------------------------


def read_out(w: Mapping[str, Tensor], spec: Spec = SPEC) -> Tensor:
    """What the values' bias comes to behind the output projection: it must not depend on the translation."""
    values = w["0.fused.bias"][24:39]
    return w["0.out"] @ values + w["0.out.bias"]


def test_a_translation_moves_its_part_of_the_bias_and_is_compensated() -> None:
    w = checkpoint(weights())
    t = random_alignment(SPEC, 5, ["y"])
    t = replace(t, elements={}, shifts={name: s for name, s in t.shifts.items() if name.startswith("0")})
    moved = t(w)
    change = moved["0.fused.bias"] - w["0.fused.bias"]
    assert torch.equal(change[:24], torch.zeros(24, dtype=torch.float64))
    assert (change[24:39] != 0).all()
    assert torch.equal(change[39:], torch.zeros(3, dtype=torch.float64))
    assert not torch.equal(moved["0.out.bias"], w["0.out.bias"])
    torch.testing.assert_close(read_out(moved), read_out(w))
    untouched = [name for name in w if name not in ("0.fused.bias", "0.out.bias")]
    assert all(torch.equal(moved[name], w[name]) for name in untouched)


def test_a_translation_is_in_the_moved_basis_and_compensated_through_the_moved_weight() -> None:
    w = checkpoint(weights())
    g = random_alignment(SPEC, 6)
    moved, unshifted = moved_by(g), moved_by(linear(g))
    assert set(g.shifts) == {"0.fused.bias", "1.fused.bias", "0.grouped.bias", "1.grouped.bias"}
    torch.testing.assert_close(moved["0.fused.bias"], unshifted["0.fused.bias"] + g.shifts["0.fused.bias"])
    torch.testing.assert_close(read_out(moved), g.elements[Instance("res")].act(read_out(w), 0))


def test_translations_compose_and_invert() -> None:
    g, h = random_alignment(SPEC, 7), random_alignment(SPEC, 8)
    one_sided = replace(linear(g), shifts={"0.fused.bias": g.shifts["0.fused.bias"]})
    assert_same(moved_by(h @ one_sided), moved_by(one_sided, h))
    assert_same(moved_by(one_sided @ h), moved_by(h, one_sided))
    assert_same(moved_by((h @ g).inverse() @ h @ g), weights())
    assert distance(moved_by(linear(g), g.inverse()), weights()) > 0.05, "the translation counts"


def test_a_value_bias_shared_by_a_group_of_query_heads_is_compensated_for_all_of_them() -> None:
    axes = {
        "res": Axis(7, Permutation()),
        "kv": Axis(2, Permutation()),
        "q": Axis(3, Permutation(), per=("kv",)),
        "v": Axis(5, Conformal(), per=("kv",)),
    }
    tensors = {"value.bias": "(kv v)", "out.weight": "res (kv q v*)", "out.bias": "res"}
    shift = Shift("value.bias", "v", "out.weight", "out.bias")
    spec = Spec("grouped", axes, expand(tensors, axes), shifts=(shift,))
    w = checkpoint(weights(spec))

    def behind(w: Mapping[str, Tensor]) -> Tensor:
        repeated = w["value.bias"].reshape(2, 1, 5).expand(2, 3, 5).reshape(-1)
        return w["out.weight"] @ repeated + w["out.bias"]

    g = random_alignment(spec, 0)
    torch.testing.assert_close(behind(g(w)), g.elements[Instance("res")].act(behind(w), 0))
    assert_same(g.inverse()(g(w)), w)


# -- files -----------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_bit_by_bit(tmp_path: Path) -> None:
    g = replace(random_alignment(SPEC, 9), provenance={"source": "a", "axes": ["x", "y"], "cost": 0.1})
    loaded = Alignment.load(g.save(tmp_path / "alignment.safetensors"))
    assert loaded.provenance == g.provenance
    assert loaded.spec.to_json() == g.spec.to_json()
    assert loaded.elements.keys() == g.elements.keys()
    for instance, element in g.elements.items():
        again = loaded.elements[instance]
        assert type(again) is type(element)
        assert again.tensors().keys() == element.tensors().keys()
        for key, t in element.tensors().items():
            assert again.tensors()[key].dtype == t.dtype
            assert torch.equal(again.tensors()[key], t)
    assert loaded.shifts.keys() == g.shifts.keys()
    assert all(torch.equal(loaded.shifts[name], t) for name, t in g.shifts.items())
    moved, again_moved = moved_by(g), moved_by(loaded)
    assert all(torch.equal(again_moved[name], moved[name]) for name in moved)


def test_identities_and_nothing_at_all_are_saved(tmp_path: Path) -> None:
    """Expanded identities share storage, which the format does not allow."""
    ones = {i: SPEC.axes[i.axis].group.identity(SPEC.axes[i.axis].size, SPEC.batch(i.axis)) for i in SPEC.movable}
    loaded = Alignment.load(Alignment(SPEC, ones).save(tmp_path / "ones.safetensors"))
    assert loaded.elements.keys() == ones.keys()
    assert all(g.is_identity() for g in loaded.elements.values())
    assert Alignment.load(Alignment(SPEC, {}).save(tmp_path / "none.safetensors")).elements == {}


def foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path, {"format": "pt"})


def truncated(path: Path) -> None:
    random_alignment(SPEC, 0).save(path)
    path.write_bytes(path.read_bytes()[:-100])


def not_a_file(path: Path) -> None:
    path.mkdir()


def rewritten(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> None:
    g = random_alignment(SPEC, 0)
    g.save(path)
    tensors = load_file(path)
    meta = {"format": "pt", "symfuse": "1", "spec": json.dumps(SPEC.to_json()), "provenance": "{}"}
    change(tensors, meta)
    save_file(tensors, path, meta)


def rename(old: str, new: str) -> Callable[[dict[str, Tensor], dict[str, str]], None]:
    def change(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
        tensors[new] = tensors.pop(old)

    return change


BROKEN: dict[str, Callable[[Path], object]] = {
    "absent": Path.exists,
    "a folder": not_a_file,
    "empty": lambda path: path.write_bytes(b""),
    "no safetensors": lambda path: path.write_bytes(b"\x00" * 64 + b"pickle"),
    "truncated": truncated,
    "of another program": foreign,
    "of another version": lambda path: rewritten(path, lambda _, meta: meta.update(symfuse="2")),
    "without a declaration": lambda path: rewritten(path, lambda _, meta: meta.pop("spec")),
    "declaration that is no JSON": lambda path: rewritten(path, lambda _, meta: meta.update(spec="{")),
    "declaration that is another": lambda path: rewritten(path, lambda _, meta: meta.update(spec="{}")),
    "unknown kind": lambda path: rewritten(path, rename("res/monomial/index", "res/octonion/index")),
    "unknown part": lambda path: rewritten(path, rename("res/monomial/index", "res/monomial/order")),
    "no instance": lambda path: rewritten(path, rename("res/monomial/index", "res?/monomial/index")),
    "undeclared axis": lambda path: rewritten(path, rename("u/monomial/index", "w/monomial/index")),
    "a translation of nothing": lambda path: rewritten(path, rename("shift/0.fused.bias", "shift/2.fused.bias")),
    "a plain name": lambda path: rewritten(path, rename("res/monomial/index", "weight")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_anything_else_is_a_checkpoint_error_that_names_the_file(case: str, tmp_path: Path) -> None:
    path = tmp_path / "alignment.safetensors"
    BROKEN[case](path)
    with pytest.raises(CheckpointError, match=r"alignment\.safetensors"):
        Alignment.load(path)


# -- dtypes ----------------------------------------------------------------------------------------

PERMUTED = ["h", "kv", "q"]
TURNED = ["res", "x", "y", "z", "u", *PERMUTED]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int8])
def test_permutations_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    g = random_alignment(SPEC, 10, PERMUTED)
    exact = {name: torch.randint(-120, 120, w.shape) for name, w in weights().items()}
    if dtype == torch.int64:
        exact = {name: w + 2**60 for name, w in exact.items()}  # more digits than a float64 has
    moved = {name: g.move(name, w.to(dtype)) for name, w in exact.items()}
    for name, w in exact.items():
        assert moved[name].dtype == dtype
        assert torch.equal(moved[name], g.move(name, w).to(dtype))
        assert torch.equal(moved[name].flatten().sort().values, w.to(dtype).flatten().sort().values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_else_is_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    g = linear(random_alignment(SPEC, 11, TURNED))
    differs = 0
    for name, w in weights(dtype=dtype).items():
        moved = g.move(name, w)
        assert moved.dtype == dtype
        assert torch.equal(moved, g.move(name, w.float()).to(dtype))
        exact = g.move(name, w.double())
        step = torch.finfo(dtype).eps * exact.abs().clamp_min(torch.finfo(dtype).tiny)
        assert ((moved.double() - exact).abs() <= step * 0.5 * (1 + 1e-2)).all(), name
        differs += int((moved.double() != exact).sum())
    assert differs > 100, "the test must have had something to round"


def test_float32_and_float64_stay_what_they_are() -> None:
    g = linear(random_alignment(SPEC, 12))
    for name, w in weights().items():
        assert g.move(name, w).dtype == torch.float64
        low = g.move(name, w.float())
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), g.move(name, w), rtol=1e-5, atol=1e-5)


def test_a_translated_bias_keeps_its_dtype() -> None:
    g = random_alignment(SPEC, 12)
    w = checkpoint(weights(dtype=torch.bfloat16))
    moved = g(w)
    assert {moved[name].dtype for name in moved} == {torch.bfloat16}
    assert {moved.info(name).dtype for name in moved} == {torch.bfloat16}


# -- laziness, and inputs left alone -----------------------------------------------------------------


class Counting(Mapping[str, Tensor]):
    """Tensors that note which of them are read: all but the first, at which the type checker of the tests
    looks whenever a mapping is passed."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        if name != next(iter(self.tensors)):
            self.read.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def counted() -> tuple[Counting, Checkpoint]:
    counting = Counting(weights())
    infos = {name: TensorInfo.of(t) for name, t in counting.tensors.items()}
    return counting, Checkpoint(counting, {}, name="source", infos=infos)


def test_reading_a_moved_tensor_reads_only_what_it_needs() -> None:
    counting, source = counted()
    moved = random_alignment(SPEC, 13)(source)
    assert list(moved) == list(SPEC.tensors)
    assert len(moved) == len(SPEC.tensors)
    assert "embed" in moved
    assert moved.info("embed").shape == (17, 7)
    assert counting.read == []
    assert moved["0.twice"].shape == (3, 4, 4)
    assert counting.read == ["0.twice"]
    counting.read.clear()
    assert moved["1.fused.bias"].shape == (42,)
    assert counting.read == ["1.fused.bias"]
    counting.read.clear()
    assert moved["0.out.bias"].shape == (7,)
    assert sorted(counting.read) == ["0.out", "0.out.bias"], "the bias, and the weight that compensates"


def test_without_translations_no_weight_is_read_for_a_bias() -> None:
    counting, source = counted()
    assert linear(random_alignment(SPEC, 13))(source)["0.out.bias"].shape == (7,)
    assert counting.read == ["0.out.bias"]


def test_two_alignments_in_a_row_still_read_once() -> None:
    counting, source = counted()
    g = linear(random_alignment(SPEC, 14))
    assert g(g(source))["0.fused"].shape == (7, 42)
    assert counting.read == ["0.fused"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inputs_are_never_modified(dtype: torch.dtype) -> None:
    w = weights(dtype=dtype)
    before = {name: t.clone() for name, t in w.items()}
    g, h = random_alignment(SPEC, 15), random_alignment(SPEC, 16)
    kept = {i: {k: t.clone() for k, t in e.tensors().items()} for i, e in g.elements.items()}
    shifts = {name: t.clone() for name, t in g.shifts.items()}
    moved = {**(h @ g.inverse())(checkpoint(w)), **g(checkpoint(w))}
    for t in moved.values():
        t.zero_()  # nor does writing into what came out reach them
    assert all(torch.equal(w[name], before[name]) for name in w)
    assert all(torch.equal(t, kept[i][k]) for i, e in g.elements.items() for k, t in e.tensors().items())
    assert all(torch.equal(g.shifts[name], t) for name, t in shifts.items())


def test_file_names_may_differ_from_canonical_ones() -> None:
    spec = replace(SPEC, names={"embed": "stored.embed"})
    w = weights(spec)
    assert "stored.embed" in w
    moved = random_alignment(spec, 17)(checkpoint(w))
    assert "stored.embed" in moved
    assert "embed" not in moved
    torch.testing.assert_close(moved["stored.embed"], random_alignment(SPEC, 17)(checkpoint(weights()))["embed"])


def test_declared_buffers_are_left_out_and_others_refused() -> None:
    w = checkpoint(weights() | {"position_ids": torch.arange(5)})
    with pytest.raises(SpecError, match="not declared: position_ids"):
        random_alignment(SPEC, 18)(w)
    moved = random_alignment(replace(SPEC, buffers=frozenset({"position_ids"})), 18)(w)
    assert set(moved) == set(SPEC.tensors)
    assert_same(moved, moved_by(random_alignment(SPEC, 18)))


def test_random_alignments_are_reproducible_and_cover_every_instance() -> None:
    one, same, other = (random_alignment(SPEC, seed) for seed in (19, 19, 20))
    assert set(one.elements) == set(SPEC.movable)
    w = weights()["0.grouped"]
    assert torch.equal(one.move("0.grouped", w), same.move("0.grouped", w))
    assert not torch.equal(one.move("0.grouped", w), other.move("0.grouped", w))
    assert {i.axis for i in random_alignment(SPEC, 19, ["x"]).elements} == {"x"}


def test_elements_have_the_kinds_of_their_groups() -> None:
    kinds = {i.axis: type(e) for i, e in random_alignment(SPEC, 21).elements.items()}
    assert kinds == dict.fromkeys(("h", "kv", "q", "res", "u", "y"), Monomial) | dict.fromkeys("xz", Similarity)
