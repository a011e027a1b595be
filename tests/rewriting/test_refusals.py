"""What has no canonical form is refused before anything is read or written, with the reason and a way out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.tiny import MODELS, case
from rewriting.kit import ALL, case_for, changed, model_of, pre_norm, randn, toy
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SpecError, SymmetryError
from symfuse.groups import Permutation
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.rewriting import canonical, fold_norms
from symfuse.spec import Axis

FOLD = ("untie", "fold_norms")


def with_gain(label: str, gain: dict[int, float], bias: dict[int, float] | None = None) -> Checkpoint:
    """The checkpoint with other entries in its final norm."""
    checkpoint = pre_norm(label).checkpoint
    name = {"gpt2-lm": "transformer.ln_f.", "gpt2-sequence": "transformer.ln_f."}.get(label, "vit.layernorm.")
    values = {}
    for part, entries in (("weight", gain), ("bias", bias or {})):
        tensor = checkpoint[name + part].clone()
        tensor[list(entries)] = torch.tensor(list(entries.values()), dtype=tensor.dtype)
        values[name + part] = tensor
    return changed(checkpoint, values)


@pytest.mark.parametrize("rewrite", ["fold_norms", "centre", "drop_gauges"])
@pytest.mark.parametrize("label", ["bert-mlm", "roberta", "torch-relu-post", "sceptr", "deberta"])
def test_post_norm_models_are_only_permuted(label: str, rewrite: str) -> None:
    with pytest.raises(SymmetryError, match=r"post-norm model passes through the gains.*only permutations.*leave"):
        canonical(Model.of(case(label).checkpoint), ("untie", rewrite))


def test_one_gain_that_is_no_declared_norm_is_enough_to_refuse() -> None:
    layouts = {"norm.weight": "|residual|", "other.weight": "|residual|", "one.weight": "out residual*"}
    axes = {"residual": Axis(5, Permutation()), "out": Axis(3)}
    shapes = {"norm.weight": (5,), "other.weight": (5,), "one.weight": (3, 5)}
    tensors = {name: randn(*shape, seed=1) for name, shape in shapes.items()}
    with pytest.raises(SymmetryError, match=r"only permutations"):
        fold_norms(toy(tensors, layouts, axes, reads={"norm.weight": ("one.weight",)}))


@pytest.mark.parametrize("label", ["gpt2", "vit", "deit", "torch-gelu-pre"])
def test_a_final_norm_that_is_the_output_is_not_folded(label: str) -> None:
    with pytest.raises(SymmetryError, match=r"output of the norm .* is the model's .*take the checkpoint with a head"):
        canonical(Model.of(MODELS[label]()), FOLD)


@pytest.mark.parametrize("rewrite", ["fold_norms", "centre"])
def test_a_tied_head_is_untied_first(rewrite: str) -> None:
    with pytest.raises(SymmetryError, match=r"lm_head.weight is transformer.wte.weight .*'untie'"):
        canonical(model_of("gpt2-lm"), [rewrite])


def test_a_stream_that_is_the_output_is_not_centred() -> None:
    with pytest.raises(SymmetryError, match=r"output is the residual stream as it is.*leave 'centre' out"):
        canonical(model_of("encoder"), ["centre"])


def test_gauges_are_void_only_behind_folded_norms() -> None:
    with pytest.raises(SymmetryError, match=r"layernorm.weight is not folded.*'fold_norms'"):
        canonical(model_of("vit-classification"), ["drop_gauges"])


def test_a_misspelt_rewrite() -> None:
    with pytest.raises(OptionError, match=r"'center' \(did you mean 'centre'\?\)"):
        canonical(model_of("gpt2-lm"), ["untie", "center"])


def test_a_stored_head_that_differs_from_its_embedding() -> None:
    checkpoint = pre_norm("gpt2-lm").checkpoint
    wrong = changed(checkpoint, {"lm_head.weight": checkpoint["transformer.wte.weight"] + 1})
    with pytest.raises(SpecError, match=r"lm_head.weight is transformer.wte.weight by config.json"):
        canonical(Model.of(wrong), ["untie"])


def test_integers_and_damaged_tensors() -> None:
    checkpoint = pre_norm("gpt2-lm").checkpoint
    name = "transformer.h.1.mlp.c_fc.weight"
    with pytest.raises(CheckpointError, match=r"floating-point weights, found .*c_fc"):
        canonical(Model.of(changed(checkpoint, {name: checkpoint[name].to(torch.int32)})), ALL)
    out = canonical(Model.of(changed(checkpoint, {name: checkpoint[name] * torch.nan})), ALL)
    with pytest.raises(CheckpointError, match=r"c_fc.weight.*holds 580 NaN"):
        out.checkpoint[name]


# -- gains of zero ------------------------------------------------------------------------------------


def test_zero_gains_before_readers_with_biases_are_nothing_special() -> None:
    checkpoint = with_gain("vit-classification", {3: 0.0, 7: 0.0})
    out = canonical(Model.of(checkpoint), ALL)
    assert case_for(checkpoint).error(out.checkpoint) < 1e-12


def test_a_zero_gain_that_a_small_head_can_make_up_for() -> None:
    """Seven labels: the rest of the head's twenty columns span all that the lost ones put out."""
    checkpoint = with_gain("gpt2-sequence", {3: 0.0, 7: 0.0})
    out = canonical(Model.of(checkpoint), ALL)
    assert case_for(checkpoint).error(out.checkpoint) < 1e-12


def test_a_zero_gain_beside_a_zero_bias_is_nothing_special() -> None:
    checkpoint = with_gain("gpt2-lm", {3: 0.0}, {3: 0.0})
    out = canonical(Model.of(checkpoint), ALL)
    assert case_for(checkpoint).error(out.checkpoint) < 1e-12


def test_a_zero_gain_that_nothing_makes_up_for() -> None:
    model = Model.of(with_gain("gpt2-lm", {3: 0.0, 7: 0.0, 11: 0.0}, {11: 0.0}))
    with pytest.raises(SymmetryError, match=r"transformer.ln_f.weight is zero at 3, 7, where .*lm_head.weight.*leave"):
        canonical(model, FOLD)


def test_a_quotient_too_large_for_its_dtype() -> None:
    checkpoint = with_gain("gpt2-lm", {3: 1e-6}, {3: 1.0}).to(torch.float16)
    out = canonical(Model.of(checkpoint), FOLD).checkpoint
    with pytest.raises(IncompatibleError, match=r"ln_f.bias: .*does not fit in float16.*wider dtype"):
        out["transformer.ln_f.bias"]
    wide = canonical(Model.of(checkpoint.to(torch.float32)), FOLD).checkpoint
    assert wide["transformer.ln_f.bias"][3] > 65504


@settings(deadline=None)
@given(st.integers(2, 11), st.integers(1, 13), st.integers(0, 4), st.booleans(), st.integers(0, 99))
def test_a_folded_norm_is_the_same_map_or_refused(d: int, out: int, zeros: int, two: bool, seed: int) -> None:
    """W (γ n + β) for every n; W n' + W δ after, exactly where rank W diag(γ) reaches W β."""
    zeros = min(zeros, d)
    axes = {"residual": Axis(d, Permutation()), "out": Axis(out)}
    readers = ("one.weight", "two.weight") if two else ("one.weight",)
    layouts = {"norm.weight": "|residual|", "norm.bias": "residual"} | dict.fromkeys(readers, "out residual*")
    gain = 1 + 0.3 * randn(d, seed=seed).clamp(-2, 2)
    gain[:zeros] = 0
    tensors = {"norm.weight": gain, "norm.bias": randn(d, seed=seed + 1)}
    tensors |= {name: randn(out, d, seed=seed + 2 + i) for i, name in enumerate(readers)}
    model = toy(tensors, layouts, axes, reads={"norm.weight": readers})
    possible = zeros == 0 or out * len(readers) <= d - zeros
    if not possible:
        with pytest.raises(SymmetryError, match=r"is zero at 0"):
            fold_norms(model)
        return
    after = fold_norms(model).checkpoint
    n = randn(d, seed=seed + 9)
    for name in readers:
        old = tensors[name] @ (gain * n + tensors["norm.bias"])
        torch.testing.assert_close(after[name] @ (n + after["norm.bias"]), old, rtol=1e-9, atol=1e-9)
