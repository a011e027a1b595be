"""The next larger group on the axes of latent attention, linear attention and short convolutions: each must change the
function. What theory says to be allowed once a gain is folded is shown to be so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from contract.test_must_fail import BROKEN, acting, applied, changed, forced, rewritten
from contract.test_must_fail_decoders import larger
from contract.test_must_fail_positions import with_group
from contract.tiny import Case, case, moving
from symfuse.alignment import Alignment
from symfuse.architectures.blocks import replaced
from symfuse.groups import Group, Invertible, Orthogonal, Permutation, Scaling, SignedMonomial
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Atom, Axis

LATENTS = {"q_latent", "kv_latent"}


def with_layouts(this: Case, axis: str, pieces: Mapping[str, str], group: Group | None = None) -> float:
    """The error of random elements on an axis where pieces of layouts are others. group: that of the axis, if another
    one."""
    layouts = {}
    for name, declared in this.spec.tensors.items():
        text = replaced(str(declared.layout), pieces)
        if text != str(declared.layout):
            layouts[name] = text
    assert layouts
    spec = rewritten(this.spec, layouts)
    spec = spec if group is None else with_group(spec, axis, group)
    return this.error(applied(this, moving(spec, 1, {axis})))


@pytest.mark.parametrize(
    ("label", "axis", "groups"),
    [
        ("latent-lm", "c", (Orthogonal(), Invertible())),
        ("latent-lm", "q_latent", (Scaling(), SignedMonomial())),
        ("latent-lm", "kv_latent", (Scaling(), SignedMonomial())),
        ("latent-v2-lite", "kv_latent", (Scaling(), SignedMonomial())),
    ],
)
def test_a_larger_group_breaks(label: str, axis: str, groups: tuple[Group, ...]) -> None:
    for group in groups:
        assert larger(case(label), axis, group) > BROKEN, group


@pytest.mark.parametrize("label", ["latent-lm", "latent-halves", "latent-v2-lm", "minicpm3-lm"])
def test_all_heads_share_the_planes_of_their_key(label: str) -> None:
    """An element for each head acts on its queries, and that of the first head on the key, which all heads have."""
    this = case(label)
    axis = replace(this.spec.axes["c"], per=("l", "h", "f"))
    g = moving(replace(this.spec, axes={**this.spec.axes, "c": axis}), 1, {"c"})
    first = {i: one.rebuild({key: t[0] for key, t in one.tensors().items()}) for i, one in g.elements.items()}
    of_keys = Alignment(this.spec, first)
    change = {}
    for name in this.spec.movable[next(iter(first))]:
        layer = name.replace("layers.0", "layers.{}")
        for at in map(layer.format, range(2)):
            file = this.spec.file_name(at)
            change[file] = (of_keys if "kv_a_proj" in at else g).move(at, this.checkpoint[file])
    assert changed(this, change) > BROKEN
    assert this.error(of_keys(this.checkpoint)) < this.exact


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [("latent-lm", "f c", "c f"), ("latent-halves", "c f", "f c"), ("minicpm3-lm", "c f", "f c")],
)
def test_halves_of_the_turned_part_are_not_neighbours(label: str, right: str, wrong: str) -> None:
    keys = {one: one.replace("c", "c*") for one in (right, wrong)}
    assert with_layouts(case(label), "c", {right: wrong, keys[right]: keys[wrong]}) > BROKEN


@pytest.mark.parametrize("label", ["latent-lm", "latent-v2-lite", "youtu-lm"])
def test_latents_are_rotated_once_the_gains_are_folded_and_not_before(label: str) -> None:
    this = case(label)
    latents = LATENTS & this.spec.axes.keys()
    for axis in latents:
        inert = forced(this.spec, lambda a: Atom(str(this.spec.sizes[a.name])) if a.name in LATENTS else a)
        assert this.error(applied(this, acting(inert, axis, Orthogonal()))) > BROKEN
    folded = canonical(Model(this.checkpoint, this.spec), ("untie", "fold_norms"))
    after = Case(folded.checkpoint, folded.spec, this.inputs, this.outputs)
    assert after.error(folded.checkpoint) < this.exact
    for axis in latents:
        assert folded.spec.axes[axis].group == Orthogonal()
        assert after.error(moving(folded.spec, 1, {axis}).on(folded)) < this.exact
        assert larger(after, axis, Scaling()) > BROKEN


LINEAR = ["qwen3-next-lm", "qwen3-5-lm"]


@pytest.mark.parametrize("label", LINEAR)
def test_channels_of_linear_attention_are_not_rotated(label: str) -> None:
    assert with_layouts(case(label), "delta_v", {"|delta_v|": "7"}, Orthogonal()) > BROKEN
    assert larger(case(label), "delta_qk", Orthogonal()) > BROKEN


def test_queries_and_keys_of_linear_attention_have_one_order() -> None:
    this = case("qwen3-5-lm")
    queries = {f"(delta_kv delta_qk{star} +": "(delta_kv 5 +" for star in ("", "*")}
    assert with_layouts(this, "delta_qk", queries) > BROKEN
    assert with_layouts(this, "delta_qk", queries, Scaling()) < this.exact  # and each its own scale, which is not moved


@pytest.mark.parametrize(
    ("label", "axis", "right", "wrong"),
    [
        ("qwen3-5-lm", "delta_qk", "delta_qk*", "|delta_qk|"),  # SiLU is behind what the taps take back
        ("qwen3-next-lm", "delta_v", "delta_v*", "|delta_v|"),
        ("qwen3-next-lm", "delta_v", "|delta_v|", "7"),
        ("qwen3-5-lm", "delta_v", "|delta_v|", "delta_v"),
        ("qwen3-5-lm", "v", "|v|", "v"),  # the gate behind attention is not linear
        ("qwen3-5-lm", "v", "|v|", "14"),
        ("lfm2-biased", "conv", "|conv| + |conv| + conv", "conv + |conv| + conv"),
        ("lfm2-biased", "conv", "|conv| + |conv| + conv", "|conv| + conv + conv"),
        ("lfm2-biased", "conv", "|conv| 1 4", "conv 1 4"),
    ],
)
def test_a_layout_with_one_more_or_one_less_breaks(label: str, axis: str, right: str, wrong: str) -> None:
    assert with_layouts(case(label), axis, {right: wrong}) > BROKEN


def test_value_heads_stay_with_their_key_head() -> None:
    this = case("qwen3-5-lm")
    spec = replace(this.spec, axes={**this.spec.axes, "m": Axis(6, Permutation(), ("l",))})
    assert with_layouts(replace(this, spec=spec), "m", {"delta_kv delta_h": "m"}) > BROKEN


@pytest.mark.parametrize("label", LINEAR)
def test_values_have_an_order_in_each_head_once_their_gain_is_folded(label: str) -> None:
    """The gain is that of all heads, and of single units: before they have one order."""
    this, at = case(label), "model.layers.0.linear_attn."
    gain, out = (this.checkpoint[f"{at}{name}.weight"] for name in ("norm", "out_proj"))
    new = {f"{at}norm.weight": torch.ones_like(gain), f"{at}out_proj.weight": out * gain.repeat(6)}
    after = replace(this, checkpoint=this.checkpoint.replace(tensors={**this.checkpoint, **new}))
    assert after.error(after.checkpoint) < this.exact
    axis = replace(this.spec.axes["delta_v"], per=("l", "delta_kv", "delta_h"), group=Permutation())
    spec = rewritten(this.spec, {"linear_attn.norm.weight": "7"})
    g = moving(replace(spec, axes={**spec.axes, "delta_v": axis}), 1, {"delta_v"})
    assert this.error(applied(this, g)) > BROKEN
    assert after.error(applied(after, g)) < this.exact


@pytest.mark.parametrize("gate", [0, 1])
def test_the_scale_of_a_gate_of_a_convolution_is_free_and_not_moved(gate: int) -> None:
    """The first gate is a factor of what is convolved, and the second of what is put out."""
    this, at = case("lfm2-lm"), "model.layers.0.conv."
    scale = 0.5 + torch.rand(24, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    thirds = list(this.checkpoint[f"{at}in_proj.weight"].chunk(3))
    out = this.checkpoint[f"{at}out_proj.weight"]
    thirds[gate] = thirds[gate] * scale
    alone = changed(this, {f"{at}in_proj.weight": torch.cat(thirds)})
    assert alone > BROKEN
    assert changed(this, {f"{at}in_proj.weight": torch.cat(thirds), f"{at}out_proj.weight": out / scale.T}) < this.exact


def test_the_halves_of_differential_attention_stay() -> None:
    """The second is subtracted; and behind the norm of the values of two heads they are rotated, and not rescaled."""
    this = case("diffllama-lm")
    assert this.spec.axes["m"].group is None
    assert larger(this, "m", Permutation()) > BROKEN
    for group in (Scaling(), Invertible()):
        assert larger(this, "v", group) > BROKEN
    shared = replace(this.spec.axes["v"], per=("l", "kv"))
    g = moving(replace(this.spec, axes={**this.spec.axes, "v": shared}), 1, {"v"})
    assert this.error(applied(this, g)) < this.exact


def test_each_product_of_differential_attention_has_a_map_of_its_own() -> None:
    """Not one orthogonal map for the four vectors."""
    this = case("diffllama-lm")
    groups = {axis: this.spec.axes[axis].group for axis in ("first_lambda", "second_lambda")}
    assert groups == dict.fromkeys(groups, Invertible())
    pieces = {"first_lambda*": "first_lambda"}
    assert with_layouts(this, "first_lambda", pieces) > BROKEN
