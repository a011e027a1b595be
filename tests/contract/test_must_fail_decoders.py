"""The next larger group on the axes of newer decoders: norms of queries and keys behind their positions, layers without
positions, sinks, groups of experts, clipped gates. Each must change the function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from contract.test_must_fail import BROKEN, acting, applied, changed, rewritten, undeclared, with_axis
from contract.test_must_fail_positions import with_group
from contract.tiny import Case, case, moving
from symfuse.alignment import Alignment
from symfuse.architectures.blocks import value_shift
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
    SignedMonomial,
)
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Axis, Shift

ATTENTION = "layers.0.self_attn."


def larger(this: Case, axis: str, group: Group) -> float:
    """The error of random elements of a group that the declaration does not allow there."""
    g = moving(with_group(this.spec, axis, group), 1, {axis})
    return this.error(applied(this, g), g)


@pytest.mark.parametrize(
    ("label", "axis", "groups"),
    [
        ("nanochat-lm", "c", (Rotary(), Orthogonal())),  # a norm without gains: turned, not rescaled
        ("nanochat-lm", "residual", (Invertible(),)),
        ("llama4-lm", "c", (Rotary(), Orthogonal())),
        ("llama4-plain", "c", (Orthogonal(), Invertible())),
        ("hunyuan-lm", "c", (Phase(), Rotary())),  # with gains behind the positions: signs
        ("apertus-lm", "c", (Phase(), Rotary())),
        ("exaone4-lm", "c", (Phase(), Rotary())),
        ("minimax-lm", "p", (Scaling(),)),
        ("phi-normed", "n", (Signed(), Scaling())),
        ("exaone4-lm", "n", (Scaling(),)),
        ("glm4-moe-lm", "n", (Scaling(),)),
        ("gpt-oss-lm", "ffn", (Signed(), Scaling(), SignedMonomial())),
        ("arcee-lm", "ffn", (Signed(), Scaling())),
        ("apertus-lm", "ffn", (Signed(), Scaling())),
        ("nanochat-lm", "ffn", (Signed(), Scaling())),
        ("xglm-lm", "residual", (Permutation(),)),
        ("nemotron-lm", "residual", (Signed(),)),
        ("phimoe-lm", "residual", (Signed(),)),
    ],
)
def test_a_larger_group_breaks(label: str, axis: str, groups: tuple[Group, ...]) -> None:
    this = case(label)
    for group in groups:
        assert larger(this, axis, group) > BROKEN, group


def test_units_of_normalised_heads_without_positions_have_one_order() -> None:
    """As their gains are those of all heads: a sign for each head, and the same order in all."""
    this = case("exaone4-lm")
    assert {i.index[0] for i in this.spec.movable if i.axis in ("n", "s")} == {0}
    layouts = {f"{ATTENTION}{one}_proj.weight": f"({heads} m) residual*" for one, heads in (("q", "kv q"), ("k", "kv"))}

    def error(group: Group) -> float:
        return undeclared(this, acting(with_axis(this.spec, "m", Axis(10, group, ("l", "kv")), layouts), "m", group))

    assert error(Sign()) < this.exact
    assert error(Permutation()) > BROKEN
    assert error(Orthogonal()) > BROKEN


@pytest.mark.parametrize(("label", "layer"), [("cohere2-lm", 1), ("granite-swa-lm", 1), ("llama4-lm", 0)])
def test_a_layer_with_positions_is_not_free(label: str, layer: int) -> None:
    this = case(label)
    free = {i.index[0] for i in this.spec.movable if i.axis == "p"}
    assert free == {1 - layer}
    at = "layers.{}.self_attn.{}_proj.weight"
    layouts = {at.format(layer, "q"): "(kv q p) residual*", at.format(layer, "k"): "(kv p*) residual*"}
    assert this.error(applied(this, moving(rewritten(this.spec, layouts), 1, {"p"}))) > BROKEN


@pytest.mark.parametrize("label", ["gpt-oss-lm", "granite-swa-lm"])
def test_no_bias_is_free_beside_a_sink(label: str) -> None:
    """The scores of a query sum to less than one, and what is added to all of them is seen beside the sink."""
    this = case(label)
    assert this.spec.shifts == ()
    key = Shift(ATTENTION + "k_proj.bias", "p*" if label == "granite-swa-lm" else "c*")
    value = value_shift(ATTENTION + "v_proj", ATTENTION + "o_proj")
    for rule in (key, value):
        spec = replace(this.spec, shifts=(rule,))
        size = this.spec.tensors[rule.bias].layout.shape(this.spec.sizes)
        noise = torch.randn(size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        assert this.error(applied(this, Alignment(spec, {}, {rule.bias: noise}))) > BROKEN


def test_experts_stay_in_their_group() -> None:
    """Where all groups are selected they decide nothing, and experts are of one kind."""
    grouped, free = case("glm4-moe-lm"), case("glm4-moe-plain")
    assert "g" in grouped.spec.axes
    assert "g" not in free.spec.axes
    rolled = torch.arange(15).roll(1)
    for this, layer, breaks in ((grouped, 0, True), (free, 1, False)):
        at = f"model.layers.{layer}.mlp."
        names = [name for name in this.checkpoint if name.startswith(at)]
        change = {name: this.checkpoint[name][rolled] for name in names if ".gate." in name}
        for name in (name for name in names if ".experts." in name):
            number, rest = name.removeprefix(at + "experts.").split(".", 1)
            change[name] = this.checkpoint[f"{at}experts.{rolled[int(number)]}.{rest}"]
        error = changed(this, change)
        assert error > BROKEN if breaks else error < this.exact


def test_blocks_of_heads_in_codegen_are_not_thirds() -> None:
    this = case("codegen-lm")
    layout = "(m h (f c + p) + m h v + m h (f c* + p*)) residual*"
    g = moving(rewritten(this.spec, {"qkv_proj.weight": layout}), 1, {"c"})
    assert this.error(applied(this, g)) > BROKEN


@pytest.mark.parametrize("label", ["phi-normed", "persimmon-lm"])
def test_heads_behind_a_norm_with_a_bias_have_one_sign(label: str) -> None:
    this = case(label)
    heads = "h" if label == "persimmon-lm" else "kv"
    spec = replace(this.spec, axes={**this.spec.axes, "s": replace(this.spec.axes["s"], per=("l", heads))})
    norms = [name for name in spec.tensors if name.endswith("_layernorm.bias") and "self_attn" in name]
    spec = replace(spec, tensors={name: d for name, d in spec.tensors.items() if name not in norms})
    files = {name: spec.file_name(name) for name in spec.tensors}
    g = acting(spec, "s", Sign())
    assert changed(this, {file: g.move(name, this.checkpoint[file]) for name, file in files.items()}) > BROKEN


@pytest.mark.parametrize(
    "label",
    [
        *("nemotron-lm", "jais2-lm", "phi-lm", "gpt-oss-lm", "glm-lm", "llama4-lm", "granitemoe-lm", "vaultgemma-lm"),
        *("mamba-lm", "mamba2-lm", "bamba-lm", "granite-hybrid-lm", "falcon-h1-lm", "nemotron-h-groups", "jamba-lm"),
    ],
)
def test_a_stream_whose_norms_are_folded_is_rotated(label: str) -> None:
    """Also behind LayerNorms whose gains are stored less 1, and with experts that are stored transposed."""
    this = case(label)
    folded = canonical(Model(this.checkpoint, this.spec), ("untie", "fold_norms", "centre"))
    before = Case(folded.checkpoint, folded.spec, this.inputs, this.outputs)
    assert before.error(folded.checkpoint) < this.exact
    assert folded.spec.axes["residual"].group == (Centred() if this.spec.centred else Orthogonal())
    g = moving(folded.spec, 1, {"residual"})
    assert before.error(g.on(folded), g) < this.exact
