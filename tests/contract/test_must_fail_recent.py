"""The next larger group on the axes of the newest families, and layouts that are wrong in one place: each must change
the function."""

from __future__ import annotations

import pytest

from contract.test_must_fail import BROKEN, acting, applied, rewritten
from contract.test_must_fail_decoders import larger
from contract.test_must_fail_latent import with_layouts
from contract.tiny import case, moving
from symfuse.groups import Group, Invertible, Orthogonal, Permutation, Phase, Scaling, Signed, SignedMonomial
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.rewriting import canonical


@pytest.mark.parametrize(
    ("label", "axis", "group"),
    [
        ("sparse-latent-lm", "index_p", Signed()),  # behind a LayerNorm
        ("longcat-lm", "c", Invertible()),
        ("longcat-lm", "kv_latent", Scaling()),
        ("kimi-linear-lm", "kv_latent", Scaling()),
        ("afmoe-lm", "c", Phase()),
        ("cohere2-mixture-lm", "c", Invertible()),
        ("cohere2-mixture-rms", "residual", Scaling()),
        ("gemma3n-lm", "v", Invertible()),  # behind a norm
        ("gemma3n-lm", "c", Phase()),
        ("gemma3n-lm", "own_ffn", SignedMonomial()),
        ("gemma3n-lm", "modality_ffn", Orthogonal()),  # behind tanh
        ("gemma3n-lm", "residual", Scaling()),
        ("gemma4-lm", "full_v", Scaling()),
        ("gemma4-mixture-lm", "full_c", Phase()),
        ("data2vec-audio-ctc", "residual", Signed()),
    ],
)
def test_a_larger_group_breaks(label: str, axis: str, group: Group) -> None:
    assert larger(case(label), axis, group) > BROKEN


@pytest.mark.parametrize(("label", "axis"), [("kimi-linear-lm", "delta_qk"), ("afmoe-lm", "v")])
def test_what_is_no_permutation_breaks_where_gates_and_decays_are_kept(label: str, axis: str) -> None:
    this = case(label)
    assert with_layouts(this, axis, {f"|{axis}|": str(this.spec.sizes[axis])}, Orthogonal()) > BROKEN


@pytest.mark.parametrize(
    ("label", "axis", "right", "wrong"),
    [
        ("sparse-latent-lm", "index_h", "index_h residual*", "3 residual*"),
        ("sparse-latent-lm", "index_p", "(turned + index_p)", "(index_p + turned)"),
        ("longcat-lm", "e", "(e + same)", "(same + e)"),
        ("longcat-lm", "c", "f c", "c f"),
        ("kimi-linear-lm", "delta_qk", "|delta_qk|", "6"),  # the memory decays by these channels
        ("kimi-linear-lm", "delta_qk", "delta_qk*", "|delta_qk|"),
        ("kimi-linear-lm", "delta_v", "|delta_v|", "6"),
        ("kimi-linear-lm", "delta_h", "1 1 delta_h 1", "1 1 3 1"),
        ("afmoe-lm", "v", "|v|", "v"),
        ("afmoe-lm", "e", "e", "9"),
        ("cohere2-mixture-lm", "c", "f c", "c f"),
        ("gemma3n-lm", "own_ffn", "|own_ffn| residual*", "7 residual*"),
        ("gemma3n-lm", "laurel_latent", "laurel_latent*", "laurel_latent"),
        ("gemma4-lm", "wide_ffn", "|wide_ffn|", "58"),
        ("gemma4-mixture-lm", "full_c", "full_q full_c* full_f", "full_q 16"),  # values are the keys
    ],
)
def test_a_layout_that_is_wrong_in_one_place_breaks(label: str, axis: str, right: str, wrong: str) -> None:
    this = case(label)
    if (label, axis) == ("afmoe-lm", "e"):  # the biases by which experts are selected
        spec = rewritten(this.spec, {"expert_bias": "9"})
        assert this.error(applied(this, moving(spec, 1, {axis}))) > BROKEN
    else:
        assert with_layouts(this, axis, {right: wrong}) > BROKEN


@pytest.mark.parametrize("label", ["gemma3n-lm", "gemma4-lm"])
@pytest.mark.parametrize("axis", ["shared_sliding_v", "shared_full_c"])
def test_a_layer_that_reads_the_keys_and_values_of_another_moves_with_it(label: str, axis: str) -> None:
    this = case(label)
    layer, name = (4, "o_proj") if axis.endswith("v") else (5, "q_proj")
    end = f"layers.{layer}.self_attn.{name}.weight"
    shape = this.checkpoint.info("model." + end).shape
    still = rewritten(this.spec, {end: " ".join(map(str, shape))})
    assert this.error(applied(this, acting(still, axis, this.spec.axes[axis].group or Permutation()))) > BROKEN


def test_the_halves_of_a_layer_of_longcat_have_elements_of_their_own() -> None:
    this = case("longcat-lm")
    g = moving(this.spec, 1, {"q_latent", "dense_ffn"})
    assert {i.index for i in g.elements if i.axis == "dense_ffn"} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_longcat_gains_before_experts_that_put_out_what_they_read_are_not_folded() -> None:
    """They would put it out without the gain."""
    this = case("longcat-lm")
    model = Model.of(this.checkpoint)
    assert this.error(canonical(model, rotatable(model.spec)).checkpoint) < this.exact
    assert not any("post_attention" in gain for gain in model.spec.reads)
