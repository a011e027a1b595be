"""Maps that look like symmetries and are not: each must change the function, or be refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from test_architectures import EXACT
from tiny import Case, case
from torch import Tensor

from symfuse.alignment import Alignment, random_alignment
from symfuse.architectures.feed_forward import neurons
from symfuse.errors import IncompatibleError, SpecError, SymmetryError
from symfuse.groups import Conformal, Group, Monomial, Orthogonal, PositiveMonomial, Scaling, Signed
from symfuse.modules import live
from symfuse.spec import Axis, Declared, Layout, Spec, Variance, parse
from symfuse.spec.layout import Atom
from symfuse.verification import run

BROKEN = 1e-3


def acting(spec: Spec, axis: str, group: Group, seed: int = 0) -> Alignment:
    """Random elements of any group on an axis, whether it is a symmetry there or not."""
    rng = torch.Generator().manual_seed(seed)
    instances = [i for i in spec.movable if i.axis == axis]
    return Alignment(spec, {i: group.random(spec.sizes[axis], spec.batch(axis), rng) for i in sorted(instances)})


def noise() -> Tensor:
    return torch.randn(20, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def changed(this: Case, change: Mapping[str, Tensor]) -> float:
    """The error when some tensors, by name in the file, are others."""
    return this.error(this.checkpoint.replace(tensors={**this.checkpoint, **change}))


def rewritten(spec: Spec, layouts: Mapping[str, str]) -> Spec:
    """The declaration with other layouts for tensors whose name has this end."""
    tensors = dict(spec.tensors)
    for name, declared in spec.tensors.items():
        for end, text in layouts.items():
            if name.endswith(end):
                tensors[name] = Declared(parse(text), declared.index)
    return replace(spec, tensors=tensors)


def forced(spec: Spec, gains: Callable[[Atom], Atom]) -> Spec:
    """The declaration with its |axis| written otherwise, so that nothing is refused."""

    def dim(node: object) -> object:
        return gains(node) if isinstance(node, Atom) and node.variance is Variance.PLAIN else node

    tensors = {name: Declared(Layout(tuple(map(dim, d.layout.dims))), d.index) for name, d in spec.tensors.items()}
    return replace(spec, tensors=tensors)


RESIDUALS = ["bert", "electra-unprojected", "gpt2", "vit", "torch-gelu-pre", "torch-relu-post"]


@pytest.mark.parametrize("label", RESIDUALS)
def test_rotating_a_residual_with_norms_is_refused(label: str) -> None:
    """C49."""
    this = case(label)
    g = acting(this.spec, "residual", Orthogonal())
    with pytest.raises(SymmetryError, match=r"no permutation part.*fold the gain first"):
        dict(g(this.checkpoint))


@pytest.mark.parametrize("label", RESIDUALS)
@pytest.mark.parametrize("gain", ["rotated", "kept", "one"])
def test_rotating_a_residual_with_norms_breaks(label: str, gain: str) -> None:
    """C49: whatever becomes of the gains, LayerNorm subtracts the mean, which a rotation mixes in."""
    this = case(label)
    spec = forced(this.spec, lambda a: Atom(a.name if gain == "rotated" else str(this.spec.sizes[a.name])))
    gains = [name for name, d in this.spec.tensors.items() if any("|" in str(a) for a in d.layout.atoms())]
    if gain == "one":
        ones = {n: torch.ones(20, dtype=torch.float64) for n in map(this.spec.file_name, gains)}
        checkpoint = this.checkpoint.replace(tensors={**this.checkpoint, **ones})
        this = replace(this, checkpoint=checkpoint, outputs=run(live(checkpoint), this.inputs))
    g = acting(spec, "residual", Orthogonal())
    assert this.error(g(this.checkpoint), g) > BROKEN


@pytest.mark.parametrize("label", ["bert", "gpt2", "vit", "deberta", "torch-gelu-pre"])
def test_rescaling_or_flipping_gelu_neurons_breaks(label: str) -> None:
    """C45."""
    this = case(label)
    for group in (Scaling(), Signed()):
        g = acting(this.spec, "ffn", group)
        assert this.error(g(this.checkpoint), g) > BROKEN


def test_flipping_relu_neurons_breaks_and_rescaling_does_not() -> None:
    """C45."""
    this = case("torch-relu-post")
    flipped, scaled = (acting(this.spec, "ffn", group) for group in (Signed(), Scaling()))
    assert this.error(flipped(this.checkpoint)) > BROKEN
    assert this.error(scaled(this.checkpoint)) < EXACT


@pytest.mark.parametrize("label", ["bert", "deit", "deberta-sequence-c2p-shared"])
def test_rotating_or_rescaling_a_tanh_pooler_breaks(label: str) -> None:
    this = case(label)
    for group in (Orthogonal(), Scaling()):
        g = acting(this.spec, "pool", group)
        assert this.error(g(this.checkpoint), g) > BROKEN


@pytest.mark.parametrize(
    ("label", "axis"),
    [("deberta-sequence", "pool"), ("electra-sequence", "head"), ("distilbert-sequence", "pre")],
)
def test_flipping_a_pooler_that_is_not_odd_breaks(label: str, axis: str) -> None:
    this = case(label)
    assert this.error(acting(this.spec, axis, Signed())(this.checkpoint)) > BROKEN


@pytest.mark.parametrize("label", ["deberta", "deberta-token", "deberta-question-p2c"])
def test_a_key_bias_is_not_free_where_it_meets_positions(label: str) -> None:
    this = case(label)
    bias = "encoder.layer.0.attention.self.key_proj.bias"
    assert bias not in {rule.bias for rule in this.spec.shifts}
    assert this.error(Alignment(this.spec, {}, {bias: noise()})(this.checkpoint)) > BROKEN


@pytest.mark.parametrize("label", ["deberta-sequence-c2p", "deberta-sequence-c2p-shared", "deberta-mlm-absolute"])
def test_a_key_bias_is_free_where_it_does_not(label: str) -> None:
    spec = case(label).spec
    assert "encoder.layer.0.attention.self.key_proj.bias" in {rule.bias for rule in spec.shifts}


BERT = "encoder.layer.0.attention."


def test_a_query_bias_is_not_free() -> None:
    this = case("bert")
    shifts = {BERT + "self.query.bias": noise()}
    assert this.error(Alignment(this.spec, {}, shifts)(this.checkpoint)) > BROKEN


def test_a_value_bias_that_is_not_taken_from_the_output_breaks() -> None:
    this = case("bert")
    name = BERT + "self.value.bias"
    assert changed(this, {name: this.checkpoint[name] + noise()}) > BROKEN


def test_queries_rescaled_without_keys_break() -> None:
    this = case("bert")
    names = [BERT + "self.query.weight", BERT + "self.query.bias"]
    assert changed(this, {name: 2 * this.checkpoint[name] for name in names}) > BROKEN


@pytest.mark.parametrize("left", ["query", "key", "value", "output.dense"])
def test_heads_that_one_projection_does_not_follow_break(left: str) -> None:
    """C42: queries, keys, values and the output's columns move as one."""
    this = case("bert")
    g = acting(this.spec, "h", this.spec.axes["h"].group)
    moved = g(this.checkpoint)
    names = [name for name in this.checkpoint if f"attention.self.{left}." in name or f"attention.{left}." in name]
    assert len(names) == 4
    kept = {name: this.checkpoint[name] for name in names}
    assert this.error(moved) < EXACT
    assert this.error(moved.replace(tensors={**moved, **kept})) > BROKEN


@pytest.mark.parametrize("left", ["query", "value"])
def test_biases_left_behind_break(left: str) -> None:
    """C41."""
    this = case("bert")
    moved = acting(this.spec, "h", this.spec.axes["h"].group)(this.checkpoint)
    kept = {name: this.checkpoint[name] for name in this.checkpoint if name.endswith(f"self.{left}.bias")}
    assert this.error(moved.replace(tensors={**moved, **kept})) > BROKEN


def test_a_rotation_across_heads_breaks() -> None:
    """As if the values of all heads were one space."""
    this = case("bert")
    axes = {**this.spec.axes, "v": Axis(20, Orthogonal(), ("l",))}
    layouts = {
        "value.weight": "v residual*",
        "value.bias": "v",
        "attention.output.dense.weight": "residual v*",
    }
    g = acting(rewritten(replace(this.spec, axes=axes), layouts), "v", Orthogonal())
    with pytest.raises(IncompatibleError, match="axis 'v' is of size 20"):
        g(this.checkpoint)
    files = map(this.spec.file_name, this.spec.tensors)
    moved = {f: g.move(name, this.checkpoint[f]) for name, f in zip(this.spec.tensors, files, strict=True)}
    assert changed(this, moved) > BROKEN


def test_a_fused_projection_read_per_head_breaks() -> None:
    """GPT-2 stores all queries, then all keys, then all values; GPT-NeoX stores the three of each head."""
    this = case("gpt2-lm")
    layouts = {"c_attn.weight": "residual* (h (qk + qk* + v))", "c_attn.bias": "(h (qk + qk* + v))"}
    for axis, group in (("h", this.spec.axes["h"].group), ("qk", Conformal()), ("v", Conformal())):
        g = acting(rewritten(this.spec, layouts), axis, group)
        assert this.error(g(this.checkpoint)) > BROKEN


def test_a_transposed_projection_read_the_other_way_breaks() -> None:
    """C25: the square output projection fits either way."""
    this = case("gpt2-lm")
    g = acting(rewritten(this.spec, {"attn.c_proj.weight": "residual (h v*)"}), "v", Conformal())
    assert this.error(g(this.checkpoint)) > BROKEN


def test_a_map_of_queries_that_keys_follow_without_its_dual_breaks() -> None:
    this = case("bert")
    spec = rewritten(this.spec, {"self.key.weight": "(h qk) residual*", "self.key.bias": "(h qk)"})
    assert this.error(acting(spec, "qk", Conformal())(this.checkpoint)) > BROKEN
    assert this.error(acting(spec, "qk", Orthogonal())(this.checkpoint)) < EXACT  # which is its own dual


def test_heads_are_not_to_be_permuted_differently_from_what_is_inside() -> None:
    """The naive inverse, axis by axis, forgets that the inner elements follow the heads."""
    this = case("bert")
    g = random_alignment(this.spec, 1)
    naive = replace(g, elements={i: e.inverse() for i, e in g.elements.items()}, shifts={})
    g = replace(g, shifts={})
    name = BERT + "self.query.weight"
    back, restored = naive(g(this.checkpoint))[name], g.inverse()(g(this.checkpoint))[name]
    assert (back - this.checkpoint[name]).abs().max() > 0.1
    assert (restored - this.checkpoint[name]).abs().max() < EXACT


def test_groups_refuse_what_is_not_theirs() -> None:
    rng = torch.Generator().manual_seed(0)
    flipped = Monomial(torch.arange(5), torch.tensor([1.0, -1, 1, 1, 1]).double())
    assert not PositiveMonomial().contains(flipped, 1e-9)
    assert not Orthogonal().contains(Conformal().random(5, (), rng), 1e-9)
    with pytest.raises(SymmetryError, match="no permutation part"):
        Orthogonal().random(5, (), rng).forget()


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(SpecError, match="activation 'softmax' is not known"):
        neurons("softmax")
