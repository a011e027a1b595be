"""Maps that look like symmetries and are not: each must change the function, or be refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from contract.tiny import EXACT, Case, case
from symfuse.alignment import Alignment, random_alignment
from symfuse.architectures.blocks import neurons
from symfuse.errors import IncompatibleError, SpecError, SymmetryError
from symfuse.groups import (
    Conformal,
    Group,
    Monomial,
    Orthogonal,
    Permutation,
    Phase,
    PositiveMonomial,
    Rotary,
    Scaling,
    Sign,
    Signed,
    SignedMonomial,
)
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.modules import live
from symfuse.rewriting import canonical
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


def applied(this: Case, g: Alignment) -> Checkpoint:
    """The model moved by the layouts of the alignment, which a call refuses if they are not those of the family."""
    return g.on(Model(this.checkpoint, g.spec))


def undeclared(this: Case, g: Alignment) -> float:
    """The error of what a move leaves whose axes are not those of the family, which an alignment itself refuses."""
    files = {name: this.spec.file_name(name) for name in this.spec.tensors}
    return changed(this, {f: g.move(name, this.checkpoint[f]) for name, f in files.items() if f in this.checkpoint})


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


RMS_RESIDUALS = ["llama-lm", "gemma-lm", "gemma2-lm", "gemma3-lm", "olmo2-lm"]
RESIDUALS = ["bert", "electra-unprojected", "gpt2", "vit", "torch-gelu-pre", "torch-relu-post"]


@pytest.mark.parametrize("label", [*RESIDUALS, *RMS_RESIDUALS, "cohere-lm"])
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
    gains = [name for name, d in this.spec.tensors.items() if any("|" in str(a) for a in d.layout.atoms)]
    if gain == "one":
        ones = {n: torch.ones(20, dtype=torch.float64) for n in map(this.spec.file_name, gains)}
        checkpoint = this.checkpoint.replace(tensors={**this.checkpoint, **ones})
        this = replace(this, checkpoint=checkpoint, outputs=run(live(checkpoint), this.inputs))
    g = acting(spec, "residual", Orthogonal())
    assert this.error(applied(this, g), g) > BROKEN


@pytest.mark.parametrize("label", ["bert", "gpt2", "vit", "deberta", "torch-gelu-pre"])
def test_rescaling_or_flipping_gelu_neurons_breaks(label: str) -> None:
    """C45."""
    this = case(label)
    for group in (Scaling(), Signed()):
        g = acting(this.spec, "ffn", group)
        assert this.error(applied(this, g), g) > BROKEN


def test_flipping_relu_neurons_breaks_and_rescaling_does_not() -> None:
    """C45."""
    this = case("torch-relu-post")
    flipped, scaled = (acting(this.spec, "ffn", group) for group in (Signed(), Scaling()))
    assert this.error(applied(this, flipped)) > BROKEN
    assert this.error(applied(this, scaled)) < EXACT


@pytest.mark.parametrize("label", ["bert", "deit", "deberta-sequence-c2p-shared"])
def test_rotating_or_rescaling_a_tanh_pooler_breaks(label: str) -> None:
    this = case(label)
    for group in (Orthogonal(), Scaling()):
        g = acting(this.spec, "pool", group)
        assert this.error(applied(this, g), g) > BROKEN


@pytest.mark.parametrize(
    ("label", "axis"),
    [("deberta-sequence", "pool"), ("electra-sequence", "head"), ("distilbert-sequence", "pre")],
)
def test_flipping_a_pooler_that_is_not_odd_breaks(label: str, axis: str) -> None:
    this = case(label)
    assert this.error(applied(this, acting(this.spec, axis, Signed()))) > BROKEN


@pytest.mark.parametrize("label", ["deberta", "deberta-token", "deberta-question-p2c"])
def test_a_key_bias_is_not_free_where_it_meets_positions(label: str) -> None:
    this = case(label)
    bias = "encoder.layer.0.attention.self.key_proj.bias"
    assert bias not in {rule.bias for rule in this.spec.shifts}
    assert this.error(applied(this, Alignment(this.spec, {}, {bias: noise()}))) > BROKEN


@pytest.mark.parametrize("label", ["deberta-sequence-c2p", "deberta-sequence-c2p-shared", "deberta-mlm-absolute"])
def test_a_key_bias_is_free_where_it_does_not(label: str) -> None:
    spec = case(label).spec
    assert "encoder.layer.0.attention.self.key_proj.bias" in {rule.bias for rule in spec.shifts}


BERT = "encoder.layer.0.attention."


def test_a_query_bias_is_not_free() -> None:
    this = case("bert")
    shifts = {BERT + "self.query.bias": noise()}
    assert this.error(applied(this, Alignment(this.spec, {}, shifts))) > BROKEN


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
    assert undeclared(this, g) > BROKEN


def test_a_fused_projection_read_per_head_breaks() -> None:
    """GPT-2 stores all queries, then all keys, then all values; GPT-NeoX stores the three of each head."""
    this = case("gpt2-lm")
    layouts = {"c_attn.weight": "residual* (h (qk + qk* + v))", "c_attn.bias": "(h (qk + qk* + v))"}
    for axis, group in (("h", this.spec.axes["h"].group), ("qk", Conformal()), ("v", Conformal())):
        g = acting(rewritten(this.spec, layouts), axis, group)
        assert this.error(applied(this, g)) > BROKEN


def test_a_transposed_projection_read_the_other_way_breaks() -> None:
    """C25: the square output projection fits either way."""
    this = case("gpt2-lm")
    g = acting(rewritten(this.spec, {"attn.c_proj.weight": "residual (h v*)"}), "v", Conformal())
    assert this.error(applied(this, g)) > BROKEN


def test_a_map_of_queries_that_keys_follow_without_its_dual_breaks() -> None:
    this = case("bert")
    spec = rewritten(this.spec, {"self.key.weight": "(h qk) residual*", "self.key.bias": "(h qk)"})
    assert this.error(applied(this, acting(spec, "qk", Conformal()))) > BROKEN
    assert this.error(applied(this, acting(spec, "qk", Orthogonal()))) < EXACT  # which is its own dual


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


def with_axis(spec: Spec, name: str, axis: Axis, layouts: Mapping[str, str]) -> Spec:
    return rewritten(replace(spec, axes={**spec.axes, name: axis}), layouts)


@pytest.mark.parametrize("label", ["llama-lm", "llama-biased", "mistral-lm", "gemma-lm", "starcoder2-lm", "cohere-lm"])
@pytest.mark.parametrize("group", [Orthogonal(), Permutation()], ids=lambda group: group.name)
def test_mixing_planes_breaks(label: str, group: Group) -> None:
    """C33: positions turn each plane by an angle of its own."""
    this = case(label)
    layouts = {"q_proj.weight": "(kv q m) residual*", "k_proj.weight": "(kv m*) residual*"}
    layouts |= {"q_proj.bias": "(kv q m)", "k_proj.bias": "(kv m*)"}
    spec = with_axis(this.spec, "m", Axis(10, group, ("l", "kv")), layouts)
    assert undeclared(this, acting(spec, "m", group)) > BROKEN


@pytest.mark.parametrize("label", ["llama-lm", "phi3-partly", "stablelm-lm", "cohere-lm"])
def test_turning_planes_keeps_and_reflecting_them_breaks(label: str) -> None:
    this = case(label)
    assert this.error(applied(this, acting(this.spec, "c", Rotary()))) < this.exact
    assert this.error(applied(this, acting(this.spec, "c", Orthogonal()))) > BROKEN


@pytest.mark.parametrize("label", ["qwen3-lm", "gemma3-lm", "olmo2-lm", "olmoe-lm"])
def test_turning_a_plane_behind_a_norm_of_queries_and_keys_breaks(label: str) -> None:
    """Their gains are of each unit: Phase keeps what RMSNorm divides by, and still breaks."""
    this = case(label)
    for group in (Phase(), Rotary()):
        assert this.error(applied(this, acting(this.spec, "c", group))) > BROKEN


@pytest.mark.parametrize(
    ("label", "place", "rest"), [("cohere-normed", "f c", ""), ("stablelm-normed", "(c f + p)", "(c* f + p*)")]
)
def test_only_a_sign_for_a_whole_head_acts_behind_a_norm_that_subtracts_the_mean(
    label: str, place: str, rest: str
) -> None:
    this = case(label)
    assert this.spec.axes["qk"].group == Sign()
    assert this.error(applied(this, acting(this.spec, "qk", Sign()))) < this.exact
    layouts = {"q_proj.weight": f"(kv q {place}) residual*", "k_proj.weight": f"(kv {rest or 'f c*'}) residual*"}
    planes = {"f": Axis(5), "p": Axis(4)}
    for group in (Sign(), Phase(), Rotary()):
        spec = replace(this.spec, axes={**this.spec.axes, **planes, "c": Axis(2, group, ("l", "kv", "f"))})
        assert undeclared(this, acting(rewritten(spec, layouts), "c", group)) > BROKEN
    queries = with_axis(this.spec, "m", this.spec.axes["qk"], {"q_proj.weight": "(kv q m) residual*"})
    assert undeclared(this, acting(queries, "m", Sign())) > BROKEN


def test_heads_stay_that_have_a_norm_under_a_name_with_their_number() -> None:
    this = case("stablelm-normed")
    assert {"kv", "q"}.isdisjoint({instance.axis for instance in this.spec.movable})
    for axis in ("kv", "q"):
        size = this.spec.sizes[axis]
        spec = replace(this.spec, axes={**this.spec.axes, axis: Axis(size, Permutation(), ("l",))})
        rolled = Monomial(torch.arange(size).roll(1))
        moved = Alignment(spec, {i: rolled for i in spec.movable if i.axis == axis})
        assert undeclared(this, moved) > BROKEN


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("llama-lm", "c f", "f c"),
        ("gemma-lm", "c f", "f c"),
        ("stablelm-lm", "c f", "f c"),
        ("cohere-lm", "f c", "c f"),
    ],
)
def test_halves_taken_for_neighbours_break(label: str, right: str, wrong: str) -> None:
    """C33: which units form a plane does not show in any shape."""
    this = case(label)
    q, k = (str(this.spec.tensors[f"layers.0.self_attn.{name}_proj.weight"].layout) for name in "qk")
    dual = [text.replace("c", "c*") for text in (right, wrong)]
    layouts = {"q_proj.weight": q.replace(right, wrong), "k_proj.weight": k.replace(*dual)}
    assert layouts != {"q_proj.weight": q, "k_proj.weight": k}
    g = acting(rewritten(this.spec, layouts), "c", Rotary())
    assert this.error(applied(this, g)) > BROKEN


def test_a_head_that_is_turned_in_part_is_not_turned_whole() -> None:
    """C34."""
    this = case("stablelm-lm")
    spec = replace(this.spec, axes={**this.spec.axes, "f": Axis(7)})
    layouts = {"q_proj.weight": "(kv q c f) residual*", "k_proj.weight": "(kv c* f) residual*"}
    assert undeclared(this, acting(rewritten(spec, layouts), "c", Rotary())) > BROKEN


@pytest.mark.parametrize("label", ["llama-lm", "phi3-lm"])
def test_query_heads_do_not_leave_their_group(label: str) -> None:
    """C32: six query heads, of which three share a key and a value."""
    this = case(label)
    fused = "(n c f + kv c* f + kv v) residual*"
    layouts = {"q_proj.weight": "(n 10) residual*", "qkv_proj.weight": fused, "o_proj.weight": "residual (n 10)"}
    spec = with_axis(this.spec, "n", Axis(6, Permutation(), ("l",)), layouts)
    spec = replace(spec, axes={**spec.axes, "c": Axis(2), "v": Axis(10)})
    assert undeclared(this, acting(spec, "n", Permutation())) > BROKEN


def test_a_value_map_across_groups_breaks() -> None:
    """C40."""
    this = case("llama-lm")
    layouts = {"v_proj.weight": "m residual*", "o_proj.weight": "residual (3 m*)"}
    spec = with_axis(this.spec, "m", Axis(20, Orthogonal(), ("l",)), layouts)
    assert undeclared(this, acting(spec, "m", Orthogonal())) > BROKEN


@pytest.mark.parametrize("label", ["llama-lm", "gemma-lm", "phi3-lm"])
def test_rescaling_or_flipping_a_gate_breaks(label: str) -> None:
    """C46: up may be rescaled and flipped, the gate not, and not permuted alone."""
    this = case(label)
    own = {"gate_proj.weight": "ffn residual*", "gate_up_proj.weight": "(ffn + ffn) residual*"}
    alone = {"up_proj.weight": "29 residual*", "gate_up_proj.weight": "(ffn + 29) residual*"}
    alone |= {"down_proj.weight": "residual 29", "gate_proj.weight": "ffn residual*"}
    assert this.error(applied(this, acting(this.spec, "ffn", SignedMonomial()))) < this.exact
    for group in (Scaling(), Signed()):
        assert this.error(applied(this, acting(rewritten(this.spec, own), "ffn", group))) > BROKEN
    assert this.error(applied(this, acting(rewritten(this.spec, alone), "ffn", Permutation()))) > BROKEN


@pytest.mark.parametrize("label", ["llama-biased", "qwen2-lm", "starcoder2-lm", "cohere-biased", "stablelm-biased"])
def test_a_key_bias_is_not_free_where_it_is_turned(label: str) -> None:
    this = case(label)
    name = "model.layers.0.self_attn.k_proj.bias"
    free = [rule for rule in this.spec.shifts if "model." + rule.bias == name]
    assert [rule.axis for rule in free] == ["p*"] * (label == "stablelm-biased")
    noise = torch.randn(this.checkpoint[name].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert changed(this, {name: this.checkpoint[name] + noise}) > BROKEN


@pytest.mark.parametrize("label", ["gemma2-lm", "gemma3-lm", "olmo2-lm", "olmo2-biased"])
def test_norms_behind_a_block_are_not_folded(label: str) -> None:
    """C36: their gains are on what is written; only signed permutations act on that stream."""
    this = case(label)
    assert this.spec.axes["residual"].group == Signed()
    with pytest.raises(SymmetryError, match="no declared pre-norm residual stream"):
        canonical(Model(this.checkpoint, this.spec), ("untie", "fold_norms"))
