"""What positions do not allow: heads with ALiBi reordered, planes mixed, the bias of a turned key; and fused
projections read in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from contract.test_must_fail import BROKEN, acting, applied, changed, rewritten
from contract.tiny import EXACT, Case, case, moving
from symfuse.alignment import Alignment
from symfuse.errors import IncompatibleError, SymmetryError
from symfuse.groups import (
    Centred,
    Group,
    Invertible,
    Orthogonal,
    Permutation,
    Phase,
    Rotary,
    Scaling,
    Sign,
    Signed,
)
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Axis, Spec

QKV = "query_key_value.weight", "query_key_value.bias"


def with_group(spec: Spec, axis: str, group: Group) -> Spec:
    """The declaration with another group on one axis."""
    return replace(spec, axes={**spec.axes, axis: replace(spec.axes[axis], group=group)})


def fused(spec: Spec, layout: str) -> Spec:
    """The declaration with another layout of a fused projection."""
    weight, bias = QKV
    return rewritten(spec, {weight: f"{layout} residual*", bias: layout})


def forced(this: Case, g: Alignment) -> float:
    """The error when elements act that the model's own declaration refuses."""
    with pytest.raises(IncompatibleError, match="does not fit this alignment"):
        g(this.checkpoint)
    files = {name: this.spec.file_name(name) for name in this.spec.tensors}
    return changed(this, {file: g.move(name, this.checkpoint[file]) for name, file in files.items()})


@pytest.mark.parametrize(
    ("label", "axis"),
    [
        ("bloom-lm", "h"),
        ("mpt-lm", "h"),
        ("falcon-alibi", "q"),
        ("falcon-grouped-alibi", "kv"),
        ("falcon-grouped-alibi", "q"),
        ("falcon-by-head-alibi", "h"),
    ],
)
def test_permuting_heads_with_alibi_breaks(label: str, axis: str) -> None:
    """C37: each index of a head has a slope of its own."""
    this = case(label)
    assert this.spec.axes[axis].group is None
    spec = with_group(this.spec, axis, Permutation())
    assert forced(this, moving(spec, 1, {axis})) > BROKEN


@pytest.mark.parametrize(
    "label", ["neox-lm", "neox-lm-turned", "gptj-lm", "falcon-lm", "falcon-grouped", "modernbert-mlm"]
)
@pytest.mark.parametrize("group", [Permutation(), Signed(), Scaling(), Invertible()], ids=lambda g: g.name)
def test_a_plane_that_is_not_multiplied_by_a_complex_number_breaks(label: str, group: Group) -> None:
    """C33: its halves swapped, reflected, or scaled apart."""
    this = case(label)
    assert forced(this, moving(with_group(this.spec, "c", group), 1, {"c"})) > BROKEN


# Layouts that take what is turned of a head for one space "m".
MIXED: Mapping[str, tuple[int, dict[str, str]]] = {
    "neox-lm": (6, dict.fromkeys(QKV, "(h (m + p + m* + p* + v))")),
    "neox-lm-turned": (10, dict.fromkeys(QKV, "(h (m + m* + v))")),
    "falcon-grouped-untied": (10, {QKV[0]: "(kv (q m + m* + v))"}),
    "gptj-lm": (6, {"q_proj.weight": "(h (m + p))", "k_proj.weight": "(h (m* + p*))"}),
}


@pytest.mark.parametrize("label", MIXED)
@pytest.mark.parametrize("group", [Permutation(), Orthogonal()], ids=lambda g: g.name)
def test_mixing_planes_breaks(label: str, group: Group) -> None:
    """C33."""
    this = case(label)
    size, layouts = MIXED[label]
    per = ("l", "kv") if "kv" in this.spec.axes else ("l", "h")
    spec = replace(this.spec, axes={**this.spec.axes, "m": Axis(size, group, per)})
    layouts = {end: layout if end.endswith("bias") else f"{layout} residual*" for end, layout in layouts.items()}
    assert forced(this, acting(rewritten(spec, layouts), "m", group)) > BROKEN


@pytest.mark.parametrize(
    ("label", "layout"),
    [
        ("neox-lm", "(h (f c + p + f c* + p* + v))"),  # neighbours
        ("neox-lm", "(h (p + c f + p* + c* f + v))"),  # the end of a head is turned
        ("neox-lm", "(h (c f + p) + h (c* f + p*) + h v)"),  # C26: thirds
        ("falcon-by-head", "(h c f + h c* f + h v)"),
        ("falcon-grouped", "(kv q c f + kv c* f + kv v)"),  # C27: all queries, then all keys
        ("falcon-grouped", "(kv (c* f + q c f + v))"),
    ],
)
def test_a_fused_projection_read_otherwise_breaks(label: str, layout: str) -> None:
    this = case(label)
    g = moving(fused(this.spec, layout), 1, {"c"})
    assert this.error(applied(this, replace(g, shifts={}))) > BROKEN


def test_neighbours_read_as_halves_break() -> None:
    """C33: GPT-J turns (2i, 2i + 1)."""
    this = case("gptj-lm")
    layouts = {"q_proj.weight": "(h (c f + p)) residual*", "k_proj.weight": "(h (c* f + p*)) residual*"}
    assert this.error(applied(this, moving(rewritten(this.spec, layouts), 1, {"c"}))) > BROKEN


@pytest.mark.parametrize(
    ("label", "atom"), [("neox-lm", "c*"), ("neox-lm", "c"), ("neox-lm", "p"), ("falcon-lm", "c*"), ("bloom-lm", "qk")]
)
def test_a_bias_of_queries_or_of_turned_keys_is_not_free(label: str, atom: str) -> None:
    this = case(label)
    name = next(name for name in this.spec.tensors if name.endswith(QKV[1]))
    shift = torch.zeros(this.spec.tensors[name].layout.shape(this.spec.sizes), dtype=torch.float64)
    view = this.spec.part(name, shift, atom).view
    view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64))
    file = this.spec.file_name(name)
    assert changed(this, {file: this.checkpoint[file] + shift}) > BROKEN


@pytest.mark.parametrize(
    ("label", "free"),
    [
        ("neox-lm", {"p*", "v"}),
        ("neox-lm-turned", {"v"}),
        ("falcon-lm", {"v"}),
        ("falcon-alibi", {"qk*", "v"}),
        ("bloom-lm", {"qk*", "v"}),
        ("opt-lm", {"qk*", "v"}),
        ("gptj-lm", set()),
        ("mpt-lm", set()),
    ],
)
def test_the_biases_that_may_move(label: str, free: set[str]) -> None:
    """C41."""
    assert {rule.axis for rule in case(label).spec.shifts} == free


@pytest.mark.parametrize("axis", ["qk", "v"])
def test_rotating_or_rescaling_what_is_clipped_breaks(axis: str) -> None:
    this = case("mpt-lm-clipped")
    for group in (Orthogonal(), Scaling()):
        assert this.error(applied(this, acting(this.spec, axis, group))) > BROKEN
    assert this.error(applied(this, acting(this.spec, axis, Signed()))) < EXACT


def test_neurons_of_opt_are_rescaled_with_relu_only() -> None:
    """C45."""
    relu, gelu = case("opt-lm"), case("opt-lm-untied")
    assert relu.error(acting(relu.spec, "ffn", Scaling())(relu.checkpoint)) < EXACT
    assert relu.error(acting(relu.spec, "ffn", Signed())(relu.checkpoint)) > BROKEN
    assert gelu.error(acting(gelu.spec, "ffn", Scaling())(gelu.checkpoint)) > BROKEN


def test_the_embedding_of_a_tied_narrow_model_is_moved_with_its_head() -> None:
    """As it is read twice, by the projection and as the head, moving one of them alone breaks."""
    this = case("opt-post-lm")
    g = moving(this.spec, 1, {"embedding"})
    moved = g(this.checkpoint)
    assert this.error(moved) < EXACT
    for name in ("decoder.project_in.weight", "decoder.project_out.weight"):
        file = this.spec.file_name(name)
        assert this.error(moved.replace(tensors={**moved, file: this.checkpoint[file]})) > BROKEN


def test_what_positions_do_not_turn_is_free_in_the_layers_of_smollm3_without_them() -> None:
    this = case("smollm3-biased")
    per_layer = {i.index[0]: i.axis for i in this.spec.movable if i.axis in ("c", "p")}
    assert per_layer == {0: "p", 1: "c"}
    assert this.error(applied(this, acting(this.spec, "p", Invertible()))) < this.exact
    name = "layers.{}.self_attn.{}_proj.weight"
    layouts = {name.format(1, "q"): "(kv q p) residual*", name.format(1, "k"): "(kv p*) residual*"}
    assert this.error(applied(this, moving(rewritten(this.spec, layouts), 1, {"p"}))) > BROKEN


@pytest.mark.parametrize(("axis", "groups"), [("c", (Rotary(), Phase())), ("v", (Orthogonal(), Scaling()))])
def test_what_olmo_clips_is_neither_turned_nor_rescaled(axis: str, groups: tuple[Group, ...]) -> None:
    this = case("olmo-clipped")
    assert this.spec.shifts == ()
    assert this.error(applied(this, acting(this.spec, axis, Sign()))) < this.exact
    for group in groups:
        assert forced(this, moving(with_group(this.spec, axis, group), 1, {axis})) > BROKEN


def test_the_stream_of_olmo_keeps_its_mean() -> None:
    this = case("olmo-tied")
    assert this.error(applied(this, acting(this.spec, "residual", Centred()))) < this.exact
    assert forced(this, moving(with_group(this.spec, "residual", Orthogonal()), 1, {"residual"})) > BROKEN


def test_the_fused_halves_of_modernbert_are_gate_and_up() -> None:
    this = case("modernbert-mlm")
    layouts = {"mlp.Wi.weight": "(ffn + |ffn|) residual*", "mlp.Wi.bias": "(ffn + |ffn|)"}
    assert this.error(applied(this, moving(rewritten(this.spec, layouts), 1, {"ffn"}))) > BROKEN


def test_the_stream_of_modernbert_is_not_rotated() -> None:
    """The gain of the embeddings' norm is of single units, and its first attention reads what that norm puts out."""
    with pytest.raises(SymmetryError, match="no declared pre-norm residual stream"):
        canonical(Model.of(case("modernbert-mlm-untied").checkpoint), ("fold_norms",))
