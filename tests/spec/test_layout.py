"""The layout language: it reads what it writes, covers every entry once, and points at what is wrong."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symfuse.errors import LayoutError
from symfuse.groups import Permutation
from symfuse.spec import Atom, Axis, Layout, Variance, expand, parse
from symfuse.spec.layout import Concat, Node, Product

SIZES = {"a": 2, "b": 3, "c": 5, "d_2": 7, "E": 11}

# Trees of (kind, parts), with atoms as text: the layouts themselves are built in the tests, since checking
# their types draws from `random`, which hypothesis does not allow while it generates.
Tree = str | tuple[str, list["Tree"]]
atoms = st.one_of(
    st.sampled_from([form.format(name) for name in SIZES for form in ("{}", "{}*", "|{}|")]),
    st.sampled_from(["1", "2", "13"]),
)
trees: st.SearchStrategy[Tree] = st.recursive(
    atoms,
    lambda inner: st.tuples(st.sampled_from(["product", "concat"]), st.lists(inner, min_size=2, max_size=3)),
    max_leaves=5,
)
shapes = st.lists(trees, min_size=1, max_size=3)
small_shapes = shapes.filter(lambda dims: math.prod(map(size, dims)) <= 50_000)


def size(tree: Tree) -> int:
    if isinstance(tree, str):
        name = tree.strip("|*")
        return SIZES[name] if name in SIZES else int(name)
    kind, parts = tree
    return (math.prod if kind == "product" else sum)(map(size, parts))


def node(tree: Tree) -> Node:
    if isinstance(tree, str):
        marks = {"*": Variance.DUAL, "|": Variance.PLAIN}
        return Atom(tree.strip("|*"), marks.get(tree[-1], Variance.PRIMAL))
    kind, parts = tree
    return {"product": Product, "concat": Concat}[kind](tuple(node(part) for part in parts))


def layout_of(dims: list[Tree]) -> Layout:
    return Layout(tuple(node(tree) for tree in dims))


def numbered(layout: Layout, sizes: dict[str, int]) -> torch.Tensor:
    """A tensor of that layout whose entries are all different."""
    shape = layout.shape(sizes)
    return torch.arange(math.prod(shape)).reshape(shape)


def cut(pattern: str, sizes: dict[str, int]) -> list[tuple[list[str], torch.Tensor]]:
    layout = parse(pattern)
    return [([str(a) for a in s.atoms], s.view) for s in layout.segments(numbered(layout, sizes), sizes)]


# -- grammar ---------------------------------------------------------------------------------------


@given(shapes)
def test_what_is_written_is_read_as_the_same_layout(dims: list[Tree]) -> None:
    layout = layout_of(dims)
    assert parse(str(layout)) == layout
    assert str(parse(str(layout))) == str(layout)


@given(shapes, st.sampled_from(["{}", " {}", "{}  ", "\t{} "]))
def test_white_space_does_not_count(dims: list[Tree], form: str) -> None:
    layout = layout_of(dims)
    text = str(layout)
    for sign in "()+":
        text = text.replace(sign, form.format(sign))
    assert parse(f"  {text} ") == layout


def test_every_variance_has_its_mark() -> None:
    assert [(a.name, a.variance) for a in parse("ffn ffn* |ffn| 3").atoms] == [
        ("ffn", Variance.PRIMAL),
        ("ffn", Variance.DUAL),
        ("ffn", Variance.PLAIN),
        ("3", Variance.PRIMAL),
    ]


def test_atoms_come_in_stored_order_with_repetitions() -> None:
    assert [str(a) for a in parse("residual* (h (c f + p + c* f))").atoms] == [
        *("residual*", "h", "c", "f", "p", "c*", "f")
    ]


# -- what a layout means ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("(a b c)", "(a (b c))"),
        ("(a b c)", "((a b) c)"),
        ("((a)) b*", "a b*"),
        ("(a + b + c)", "(a + (b + c))"),
        ("(a + b + c)", "((a + b) + c)"),
        ("(a (b + b*) c)", "(a ((b + b*) c))"),
        ("(a b + c) a", "((a b) + c) a"),
        ("(a (b c) + |a|) (b + c)", "((a b c) + |a|) ((b) + c)"),
    ],
)
@pytest.mark.parametrize("sizes", list(itertools.permutations((2, 3, 5, 7, 11), 3))[::7])
def test_equivalent_patterns_cut_alike(left: str, right: str, sizes: tuple[int, int, int]) -> None:
    named = dict(zip("abc", sizes, strict=True))
    one, other = cut(left, named), cut(right, named)
    assert [a for a, _ in one] == [a for a, _ in other]
    assert all(torch.equal(v, w) for (_, v), (_, w) in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("(a b)", "(b a)"),  # the slowest comes first
        ("(a b + a c)", "(a (b + c))"),  # fused by block, or interleaved in each a
        ("(a + b)", "(b + a)"),
        ("a b", "(a b)"),
        ("a", "a*"),
        ("a", "|a|"),
    ],
)
def test_different_patterns_cut_differently(left: str, right: str) -> None:
    one, other = cut(left, SIZES), cut(right, SIZES)
    same_atoms = [a for a, _ in one] == [a for a, _ in other]
    same_views = all(torch.equal(v, w) for (_, v), (_, w) in zip(one, other, strict=False))
    assert parse(left) != parse(right)
    assert not (same_atoms and same_views) or parse(left).shape(SIZES) != parse(right).shape(SIZES)


def test_fused_projection_by_hand() -> None:
    """GPT-2's: rows read the residual, columns are queries, keys and values in turn, each by head."""
    sizes = {"r": 7, "h": 2, "x": 3, "v": 5}
    w = numbered(parse("r* (h x + h x* + h v)"), sizes)
    query, key, value = (s.view for s in parse("r* (h x + h x* + h v)").segments(w, sizes))
    assert torch.equal(query, w[:, :6].reshape(7, 2, 3))
    assert torch.equal(key, w[:, 6:12].reshape(7, 2, 3))
    assert torch.equal(value, w[:, 12:].reshape(7, 2, 5))


def test_interleaved_projection_by_hand() -> None:
    """GPT-NeoX's: each head holds its own query, then its own key."""
    sizes = {"h": 3, "q": 2, "k": 5}
    w = numbered(parse("(h (q + k))"), sizes)
    query, key = (s.view for s in parse("(h (q + k))").segments(w, sizes))
    assert torch.equal(query, w.reshape(3, 7)[:, :2])
    assert torch.equal(key, w.reshape(3, 7)[:, 2:])


@settings(max_examples=60)
@given(small_shapes)
def test_segments_cover_every_entry_once_and_write_through(dims: list[Tree]) -> None:
    layout = layout_of(dims)
    assert layout.shape(SIZES) == tuple(map(size, dims))
    tensor = numbered(layout, SIZES)
    before = tensor.clone()
    segments = list(layout.segments(tensor, SIZES))
    seen = torch.cat([s.view.reshape(-1) for s in segments])
    assert torch.equal(seen.sort().values, torch.arange(tensor.numel()))
    assert torch.equal(tensor, before)
    for segment in segments:
        sizes = [int(a.name) if a.name.isdigit() else SIZES[a.name] for a in segment.atoms]
        assert list(segment.view.shape) == sizes

    written = torch.zeros(layout.shape(SIZES))
    for segment in layout.segments(written, SIZES):
        segment.view.add_(1)
    assert torch.equal(written, torch.ones_like(written))


@settings(max_examples=60)
@given(small_shapes)
def test_a_non_contiguous_tensor_is_cut_without_a_copy(dims: list[Tree]) -> None:
    layout = layout_of(dims)
    backwards = torch.zeros(tuple(reversed(layout.shape(SIZES))))
    stored = backwards.permute(*reversed(range(backwards.ndim)))
    for segment in layout.segments(stored, SIZES):
        segment.view.add_(1)
    assert torch.equal(backwards, torch.ones_like(backwards))


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("a $ b", 2, "cannot read this"),
        ("a   -b", 4, "cannot read this"),
        ("|a b", 0, "cannot read this"),
        ("a **", 2, "cannot read this"),
        ("a**", 0, "cannot read this"),
        ("a 007", 2, "cannot read this"),
        ("2a b", 0, "cannot read this"),
        ("|a|b", 0, "cannot read this"),
        ("a*b", 0, "cannot read this"),
        ("(a b", 0, "this '(' is never closed"),
        ("a (b (c + d)", 2, "this '(' is never closed"),
        ("a)", 1, "nothing is open here"),
        ("a + b", 2, "nothing is open here"),
        (") a", 0, "nothing is open here"),
        ("a ()", 3, "expected an axis or '('"),
        ("(a + )", 5, "expected an axis or '('"),
        ("(a ++ b)", 4, "expected an axis or '('"),
        ("(+ b)", 1, "expected an axis or '('"),
        ("a (", 3, "expected an axis or '('"),
        ("a (b + ", 7, "expected an axis or '('"),
    ],
)
def test_a_syntax_error_has_a_caret_under_its_place(text: str, column: int, why: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse(text)
    message, shown, caret = str(error.value).split("\n")
    assert why in message
    assert shown == "    " + text
    assert caret == "    " + " " * column + "^"


def test_a_tensor_without_dimensions_has_a_layout() -> None:
    layout = parse("()")
    assert (str(layout), layout.shape({}), list(layout.parts)) == ("()", (), [()])
    (segment,) = layout.segments(torch.tensor(2.0), {})
    assert (segment.view.item(), segment.atoms) == (2.0, ())


@pytest.mark.parametrize("text", ["", "   "])
def test_an_empty_layout_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="it is empty"):
        parse(text)


@given(st.text(alphabet="ab1*|()+ \t$", max_size=12))
def test_any_text_parses_or_is_a_layout_error(text: str) -> None:
    try:
        layout = parse(text)
    except LayoutError:
        return
    assert parse(str(layout)) == layout


def test_a_shape_that_does_not_fit_is_shown_under_its_dimension() -> None:
    layout = parse("residual* (h x + h x* + h v) 2")
    with pytest.raises(LayoutError) as error:
        layout.check("c_attn.weight", (7, 21, 2), {"residual": 7, "h": 2, "x": 3, "v": 5})
    assert str(error.value).split("\n") == [
        "c_attn.weight: the stored shape (7, 21, 2) does not fit its layout",
        "    residual* (h x + h x* + h v) 2",
        "              ^^^^^^^^^^^^^^^^^^ 22, but 21",
        "expected (7, 22, 2) (residual = 7, h = 2, x = 3, v = 5); does config.json belong to these weights?",
    ]


def test_another_number_of_dimensions_is_said_without_a_caret() -> None:
    with pytest.raises(LayoutError) as error:
        parse("a b").check("w", (6,), SIZES)
    assert "^" not in str(error.value)
    assert "the stored shape (6,)" in str(error.value)
    assert "expected (2, 3) (a = 2, b = 3)" in str(error.value)


def test_a_fitting_shape_passes_and_a_torch_size_will_do() -> None:
    assert parse("(a b) c").check("w", torch.zeros(6, 5).shape, SIZES) is None


def test_an_undeclared_axis_is_named_with_those_that_are_declared() -> None:
    with pytest.raises(LayoutError, match="axis 'z' is not declared; declared are a, b"):
        parse("a (b z)").shape({"a": 2, "b": 3})


def test_expand_makes_one_tensor_for_each_index_and_checks_axes() -> None:
    axes = {"l": Axis(3), "a": Axis(2)}
    declared = expand({"layer.{l}.w": "a", "top": "a"}, axes)
    assert list(declared) == ["layer.0.w", "layer.1.w", "layer.2.w", "top"]
    assert declared["layer.2.w"].index == {"l": 2}
    with pytest.raises(LayoutError, match=r"layer\.{l}\.w: axis 'b' is not declared"):
        expand({"layer.{l}.w": "a b"}, axes)


def test_a_full_name_behind_its_template_is_an_exception() -> None:
    axes = {"l": Axis(3), "a": Axis(2), "b": Axis(5), "v": Axis(4, Permutation(), per=("l",))}
    templates = {"layer.{l}.w": "a", "layer.{l}.n": "a", "layer.1.w": "v b", "layer.0.n": ""}
    declared = expand(templates, axes)
    assert list(declared) == ["layer.0.w", "layer.1.w", "layer.2.w", "layer.1.n", "layer.2.n"]
    assert [str(d.layout) for d in declared.values()] == ["a", "v b", "a", "a", "a"]
    assert declared["layer.1.w"].index == {"l": 1}
    with pytest.raises(LayoutError, match=r"w\.1: axis 'v' has one element for each index of 'l'"):
        expand({"layer.{l}.w": "a", "w.1": "v b"}, axes)


def test_expand_refuses_an_element_that_cannot_be_told() -> None:
    axes = {"h": Axis(2, Permutation()), "v": Axis(3, Permutation(), per=("h",)), "r": Axis(5)}
    assert list(expand({"w": "(h v + h v) r"}, axes)) == ["w"]  # once in each part
    for layout in ("h v h v*", "v r", "(h r + v)"):
        with pytest.raises(LayoutError, match=r"w: axis 'v' has one element for each index of 'h'"):
            expand({"w": layout}, axes)
