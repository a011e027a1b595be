"""A narrower model in the shape of a wider one computes what it did, in the real class; or it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.tiny import GPT2, MODELS, TEXT, case, hf, of, real
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SpecError, SymmetryError
from symfuse.io import open as open_checkpoint
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.modules import live
from symfuse.rewriting import canonical
from symfuse.spec import Instance
from symfuse.verification import run
from symfuse.widths import Duplication, Isometry, Widening, expand, widened
from symfuse.widths.resized import resized
from symfuse.widths.shape import shape_of
from widths.wider import Sizes, double, error, framed, half, inside, like, narrow, neurons, queries

# The real classes add in another order when they are wider: of all models the worst is 1e-13.
TOLERANCE = 1e-12

WAYS: Mapping[str, tuple[Callable[[str], Model], Sizes]] = {
    "double": (narrow, double),
    "neurons": (narrow, neurons),
    "inside": (narrow, inside),
    "queries": (narrow, queries),
    "half": (framed, half),
}
# One of each kind of block, in the ways that are not refused.
FIRST = {
    "double": [
        "torch-relu-post", "bert-mlm", "deberta-mlm-v3", "vit", "gpt2-lm", "gemma-lm", "olmo2-lm", "mixtral-lm",
        "t5-lm", "beit-codes-masked", "mamba-lm", "jamba-lm",
    ],
    "neurons": ["llama-lm"],
    "inside": ["bert-mlm", "gpt2-lm", "t5-lm", "mpt-lm"],
    "queries": ["qwen2-lm"],
    "half": ["gpt2-lm", "vit-classification", "llama-lm", "olmo-base"],
}  # fmt: skip
# In how many models each way is exact, at the least: of the others configs cannot be, or symfuse refuses them.
EXACT = {"double": len(MODELS) - 28, "neurons": len(MODELS), "inside": 349, "queries": 75, "half": 85}

ALIBI = {label for label in MODELS if label.startswith(("bloom", "mpt")) or "alibi" in label}
SINES = {"marian", "marian-lm", "marian-lm-apart", "m2m-100-lm", *(one for one in MODELS if one.startswith("xlnet"))}
# What may not have twice of everything. (Of SCEPTR the features that are embedded would be other ones.)
REASONS = re.compile("no exact map|no multiple of them|stays as it is|cannot be padded|nowhere narrower")
SCANS = {"mamba2", "mamba2-lm", "bamba-lm", "granite-hybrid-lm", "granite-hybrid-dense"}
ROOTS = {"gemma3n-lm", "gemma4-lm", "gemma4-mixture-lm"}
REFUSED = ALIBI | SINES | SCANS | ROOTS | {"sceptr", "stablelm-normed", "wavlm-frames", "wavlm-ctc"}


def outcome(way: str, label: str) -> str:
    """Nothing if the expanded model computes the same; else why there is none."""
    make, sizes = WAYS[way]
    try:
        model, wide = make(label), like(narrow(label), sizes)
        expanded = expand(model, wide)
        found = error(case(label), expanded, widened(model, wide))
    except IncompatibleError as refusal:
        return f"refused: {refusal}"
    except (SpecError, SymmetryError, CheckpointError) as unfit:  # no such heads, no such frame; configs are checked
        return f"no such model: {unfit}"
    assert found < TOLERANCE, label
    ours, theirs = expanded.spec.sizes, wide.spec.sizes
    both = ours.keys() & theirs.keys()
    assert {axis: ours[axis] for axis in both} == {axis: theirs[axis] for axis in both}
    return ""


@pytest.mark.parametrize(("way", "label"), [(way, label) for way, labels in FIRST.items() for label in labels])
def test_an_expanded_model_computes_the_same(way: str, label: str) -> None:
    assert outcome(way, label) == ""


@pytest.mark.parametrize(
    ("label", "field"),
    [("falcon-mamba", "state_size"), ("falcon-mamba", "time_step_rank"), ("mamba2-lm", "state_size"), ("mamba-lm", "")],
)
def test_what_is_scanned_is_widened_where_nothing_normalises_or_multiplies_it(label: str, field: str) -> None:
    """Twice the states of Mamba-2 would be twice its outputs; halves behind a norm would be whole again."""
    model = narrow(label)
    fields = {field} if field else {"state_size", "time_step_rank"}
    wide = like(model, lambda key, value: 2 * value if key in fields else value)
    if field:
        with pytest.raises(IncompatibleError, match="what a state space scans stays as it is"):
            expand(model, wide)
    else:
        assert error(case(label), expand(model, wide), widened(model, wide)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_model_computes_the_same_or_is_refused(way: str) -> None:
    why = {label: outcome(way, label) for label in MODELS}
    assert [label for label, text in why.items() if text.startswith("refused") and not REASONS.search(text)] == []
    assert list(why.values()).count("") >= EXACT[way]
    if way == "double":
        assert {label for label, text in why.items() if text} == REFUSED


@settings(max_examples=5, deadline=None)
@given(heads=st.integers(4, 9), size=st.integers(5, 8), neurons=st.integers(29, 60))
def test_in_the_rotatable_frame_any_larger_size_is_exact(heads: int, size: int, neurons: int) -> None:
    """The epsilon of the norms is 0.2, so that it is felt."""
    model = Model.of(of("GPT2LMHeadModel", "GPT2Config", GPT2, layer_norm_epsilon=0.2)())
    found = replace(
        case("gpt2-lm"), checkpoint=model.checkpoint, outputs=run(real(model.checkpoint), case("gpt2-lm").inputs)
    )
    wide = like(model, lambda key, value: {"n_embd": heads * size, "n_head": heads, "n_inner": neurons}.get(key, value))
    expanded = expand(canonical(model, rotatable(model.spec)), wide)
    assert error(found, expanded, {}) < 1e-12


def through(model: Model, wide: Model, maps: Mapping[Instance, Widening]) -> Model:
    """Through other maps than those that are right."""
    right = widened(model, wide)
    return resized(shape_of(model, wide), {**right, **maps}, {})


def unchecked(size: int, index: torch.Tensor, share: torch.Tensor) -> Duplication:
    """Copies whose shares need not sum to one."""
    out = object.__new__(Duplication)
    for key, value in {"size": size, "index": index, "share": share}.items():
        object.__setattr__(out, key, value)
    return out


def test_shares_that_do_not_sum_to_one_change_the_function() -> None:
    model, found = narrow("bert-sequence"), case("bert-sequence")
    wide = like(model, neurons)
    right = widened(model, wide)
    ffn = right[Instance("ffn", (0,))]
    assert isinstance(ffn, Duplication)
    wrong = unchecked(ffn.size, ffn.index, torch.ones_like(ffn.share))
    assert error(found, through(model, wide, {}), {}) < 1e-12
    assert error(found, through(model, wide, {Instance("ffn", (0,)): wrong}), {}) > 1e-4


def test_units_of_a_normed_stream_that_are_copied_unequally_often_change_the_function() -> None:
    model, found = narrow("bert-sequence"), case("bert-sequence")
    wide = like(model, double)
    n = model.spec.sizes["residual"]
    index = torch.cat([torch.arange(n), torch.zeros(n, dtype=torch.long)])
    stream = Instance("residual")
    assert error(found, through(model, wide, {stream: Duplication.even(n, 2 * n)}), {}) < 1e-12
    assert error(found, through(model, wide, {stream: Duplication.of(index, n)}), {}) > 1e-3


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_wider_head_needs_its_scale_made_up_for(scale: float) -> None:
    model, found = narrow("bert-sequence"), case("bert-sequence")
    wide = like(model, inside)
    wrong = {i: Isometry.padding(5, 10, scale) for i in widened(model, wide) if i.axis == "qk"}
    assert error(found, through(model, wide, wrong), {}) > 1e-4


def test_a_rotated_stream_needs_its_length_made_up_for() -> None:
    model, found = framed("gpt2-lm"), case("gpt2-lm")
    wide = like(narrow("gpt2-lm"), half)
    stream = widened(model, wide)[Instance("residual")]
    assert isinstance(stream, Isometry)
    short = Isometry(stream.matrix)
    rng = torch.Generator().manual_seed(0)
    turned = Isometry.stream(torch.linalg.qr(torch.randn(30, 20, generator=rng, dtype=torch.float64)).Q)  # has a mean
    assert error(found, through(model, wide, {Instance("residual"): stream}), {}) < 1e-12
    for wrong in (short, turned):
        assert error(found, through(model, wide, {Instance("residual"): wrong}), {}) > 1e-5


def test_no_multiple_of_a_stream_is_refused_outside_of_the_frame() -> None:
    with pytest.raises(IncompatibleError, match=r"no multiple of them\. A norm .* `canonical\(model, rotatable"):
        expand(narrow("gpt2-lm"), like(narrow("gpt2-lm"), half))
    with pytest.raises(IncompatibleError, match=r"equally many copies$"):
        expand(narrow("bert-mlm"), like(narrow("bert-mlm"), half))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_hidden_layers": 3}, "the numbers of layers differ"),
        ({"vocab_size": 62}, "tokens"),
        ({"max_position_embeddings": 38}, "one row per position"),
        ({"hidden_size": 10, "num_attention_heads": 2}, "narrower"),
        ({"hidden_size": 10, "intermediate_size": 99, "num_attention_heads": 2}, "narrower"),
    ],
)
def test_what_is_not_wider_is_refused(change: dict[str, int], why: str) -> None:
    model = narrow("bert")
    with pytest.raises(IncompatibleError, match=why):
        expand(model, like(model, lambda key, size: change.get(key, size)))


def test_another_family_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="one is a bert, the other a gpt2"):
        expand(narrow("bert"), narrow("gpt2"))


def test_wider_rotary_heads_and_more_experts_are_refused() -> None:
    model = narrow("mixtral-lm")
    with pytest.raises(IncompatibleError, match="frequencies of rotary positions"):
        expand(model, like(model, lambda key, size: 14 if key == "head_dim" else size))
    with pytest.raises(IncompatibleError, match="a router chooses some"):
        expand(model, like(model, lambda key, size: 12 if key == "num_local_experts" else size))


def test_the_same_shape_is_the_same_model() -> None:
    model = narrow("bert")
    assert expand(model, model) is model


def test_copies_are_chosen_and_checked() -> None:
    model, found = narrow("bert-sequence"), case("bert-sequence")
    wide = like(model, neurons)
    ffn = Instance("ffn", (1,))
    index = torch.cat([torch.arange(29), torch.zeros(12, dtype=torch.long)])
    share = torch.where(index == 0, 0.0, 1.0).double()
    share[0], share[-1] = -0.5, 1.5
    assert error(found, expand(model, wide, {ffn: Duplication(29, index, share)}), {}) < 1e-12
    with pytest.raises(OptionError, match=r"copies: ffn\[1\] has 29 units and is to have 41"):
        expand(model, wide, {ffn: Duplication.even(29, 40)})
    with pytest.raises(OptionError, match=r"qk\[0\] is not widened by copies"):
        expand(model, wide, {Instance("qk", (0,)): Duplication.even(29, 40)})
    unequal = torch.cat([torch.arange(20), torch.zeros(20, dtype=torch.long)])
    with pytest.raises(IncompatibleError, match="have not equally many copies"):
        expand(model, like(model, double), {Instance("residual"): Duplication.of(unequal, 20)})
    with pytest.raises(SymmetryError, match="not to one"):
        Duplication(3, torch.tensor([0, 1, 2, 2]), torch.tensor([1.0, 1.0, 0.5, 0.6]))
    with pytest.raises(SymmetryError, match="not to one"):  # unit 2 has no copy
        Duplication.of(torch.tensor([0, 1, 1]), 3)


@pytest.mark.parametrize(
    "label",
    [
        "gpt2-lm",
        "mixtral-lm",
        *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("bert-mlm", "llama-lm", "t5-lm")),
    ],
)
def test_files_of_an_expanded_model_load_without_complaint(label: str, tmp_path: Path) -> None:
    kind = getattr(transformers, case(label).checkpoint.name)
    live(case(label).checkpoint).save_pretrained(tmp_path / "narrow")
    model = Model.of(open_checkpoint(tmp_path / "narrow"))
    model = canonical(model, rotatable(model.spec)) if label == "gpt2-lm" else model
    wide = like(model, half if label == "gpt2-lm" else double)
    expand(model, wide).checkpoint.save(tmp_path / "wide")
    _, report = kind.from_pretrained(tmp_path / "wide", output_loading_info=True)
    assert not any(report.values()), report
    again = Model.of(open_checkpoint(tmp_path / "wide"))
    assert error(case(label), again, widened(model, wide)) < TOLERANCE


def test_a_tied_head_is_untied_where_its_stream_grows() -> None:
    model = narrow("bert-mlm")
    assert expand(model, like(model, neurons)).checkpoint.config["tie_word_embeddings"]
    wide = expand(model, like(model, double))
    assert not wide.checkpoint.config["tie_word_embeddings"]
    assert "tie" in wide.notes[-1]


def test_hidden_states_by_hand() -> None:
    """Of a BERT without layers: what its embeddings put out, twice."""
    config = transformers.BertConfig(**TEXT | {"num_hidden_layers": 1})
    model = Model.of(hf("BertModel", config))
    expanded = expand(model, like(model, double))
    ours, theirs = (one.read("embeddings.word_embeddings.weight") for one in (model, expanded))
    torch.testing.assert_close(theirs, torch.cat([ours, ours], -1), rtol=0, atol=0)
    ours, theirs = (one.read("encoder.layer.0.intermediate.dense.weight") for one in (model, expanded))
    torch.testing.assert_close(theirs, torch.cat([torch.cat([ours, ours], -1) / 2] * 2), rtol=0, atol=0)
