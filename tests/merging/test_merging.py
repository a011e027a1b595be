"""Merging: the arithmetic against the formula, dtypes, heads, and the models that are refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract.tiny import GPT2, MODELS, TEXT, encoder, of
from symfuse import api
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SymfuseWarning
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint

HALF = [torch.bfloat16, torch.float16]
WIDE = [torch.float32, torch.float64]
SMALL = {"hidden_size": 6, "num_attention_heads": 2, "intermediate_size": 5, "num_hidden_layers": 1}


@cache
def small(seed: int) -> Checkpoint:
    return encoder(seed, **SMALL)


def cast(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    return checkpoint.replace(tensors={name: tensor.to(dtype) for name, tensor in checkpoint.items()})


def filled(value: float | Sequence[float], dtype: torch.dtype = torch.float64, name: str = "a") -> Checkpoint:
    """A small model of which every entry is that value, or each tensor starts with those values."""
    values = [value] if isinstance(value, (int, float)) else list(value)
    tensors = {}
    for key, tensor in small(0).items():
        flat = torch.full((tensor.numel(),), float(values[-1]), dtype=dtype)
        flat[: len(values)] = torch.tensor(values, dtype=dtype)
        tensors[key] = flat.reshape(tensor.shape)
    return open_checkpoint(tensors, config=small(0).config, name=name)


def with_tensors(checkpoint: Checkpoint, changed: Mapping[str, Tensor], **config: object) -> Checkpoint:
    tensors = dict(checkpoint) | dict(changed)
    return open_checkpoint(tensors, config={**checkpoint.config, **config}, name=checkpoint.name)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(bits(tensor), bits(b[name])), name


# ---- the formula


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("label", ["torch-relu-post", "bert-mlm", "gpt2-lm"])
def test_linear_is_the_weighted_mean(label: str, count: int) -> None:
    models = [MODELS[label](seed) for seed in range(count)]
    mean = api.merge(models)
    weighted = api.merge(models, weights=[1.0, 3.0, 4.0][:count])
    assert mean.keys() == models[0].keys()
    for name in mean:
        stack = torch.stack([model[name] for model in models])
        torch.testing.assert_close(mean[name], stack.mean(0), rtol=0, atol=1e-15)
        shares = torch.tensor([1.0, 3.0, 4.0][:count], dtype=torch.float64)
        expected = torch.tensordot(shares / shares.sum(), stack, 1)
        torch.testing.assert_close(weighted[name], expected, rtol=0, atol=1e-15)


weight = st.floats(-3, 3, allow_nan=False).filter(lambda w: w == 0 or abs(w) > 1e-3)


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(weight, min_size=2, max_size=4), normalize=st.booleans())
def test_any_weights(weights: list[float], normalize: bool) -> None:
    models = [small(seed) for seed in range(len(weights))]
    total = math.fsum(weights)
    if normalize and total < 1e-2:
        with pytest.raises(OptionError, match=r"sum to") if total <= 0 else nullcontext():
            api.merge(models, weights=weights, parameters={"normalize": normalize})
        return
    merged = api.merge(models, weights=weights, parameters={"normalize": normalize})
    scale = 1 / total if normalize else 1.0
    for name in merged:
        expected = torch.zeros_like(merged[name])
        for model, w in zip(models, weights, strict=True):
            expected += w * scale * model[name]
        size = sum(abs(w * scale) for w in weights)
        torch.testing.assert_close(merged[name], expected, rtol=0, atol=1e-14 * (1 + size))


def test_c66_weights_that_do_not_sum_to_one() -> None:
    model = small(0)
    normalised = api.merge([model, model], weights=[0.1, 1.0])
    assert_same_bits(dict(normalised), dict(model))
    as_they_are = api.merge([model, model], weights=[0.1, 1.0], parameters={"normalize": False})
    assert_same_bits(dict(as_they_are), {name: 0.1 * tensor + tensor for name, tensor in model.items()})
    assert "0.0909091·" in normalised.name
    assert "0.1·" in as_they_are.name


def test_c67_negative_weights() -> None:
    a, b = small(0), small(1)
    away = api.merge([a, b], weights=[1.5, -0.5])
    for name in a:
        torch.testing.assert_close(away[name], a[name] - 0.5 * (b[name] - a[name]), rtol=0, atol=1e-15)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [0.0, 0.0], [0.1 + 0.2, -0.3]])
def test_c67_weights_that_sum_to_zero_are_not_normalised(weights: list[float]) -> None:
    a, b = small(0), small(1)
    with pytest.raises(OptionError, match="sum to zero"):
        api.merge([a, b], weights=weights)
    difference = api.merge([a, b], weights=weights, parameters={"normalize": False})
    for name in a:
        expected = weights[0] * a[name] + weights[1] * b[name]
        torch.testing.assert_close(difference[name], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("weights", [[0.5], [0.2, 0.3, 0.5], [0.5, math.nan], [0.5, math.inf], []])
def test_weights_that_make_no_sense(weights: list[float]) -> None:
    with pytest.raises(OptionError, match="weight"):
        api.merge([small(0), small(1)], weights=weights)


# ---- order


def test_c69_the_weight_belongs_to_the_model_in_its_place() -> None:
    zeros, ones = filled(0.0), filled(1.0, name="b")
    for models, weights in (([zeros, ones], [0.25, 0.75]), ([ones, zeros], [0.75, 0.25])):
        merged = api.merge(models, weights=weights)
        assert all(bool((tensor == 0.75).all()) for tensor in merged.values())


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dtype", HALF + WIDE)
def test_c69_the_order_of_the_list_does_not_matter(dtype: torch.dtype, named: bool) -> None:
    """Even if all have one name, as live modules of one class and folders called `checkpoint` do."""
    models = [cast(small(seed), dtype) for seed in range(3)]
    models = [model.replace(name=str(i) if named else "same") for i, model in enumerate(models)]
    for weights in ([1.0, 1.0, 1.0], [1.0, 1.0, 0.3]):
        first = dict(api.merge(models, weights=weights))
        for order in itertools.permutations(range(3)):
            again = api.merge([models[i] for i in order], weights=[weights[i] for i in order])
            assert_same_bits(dict(again), first)


# ---- dtypes


@pytest.mark.parametrize("dtype", HALF + WIDE)
@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.3, 0.7], [1 / 3, 1 / 3, 1 / 3], [0.1, 0.2, 0.7], [2.0, -1.0]])
def test_a_merge_with_itself_is_itself(dtype: torch.dtype, weights: list[float]) -> None:
    model = cast(small(0), dtype)
    special = with_tensors(model, {"layers.0.norm1.bias": torch.tensor([0.0, -0.0, 1e-7, -6e-8, 3.0, 6e4]).to(dtype)})
    assert_same_bits(dict(api.merge([special] * len(weights), weights=weights)), dict(special))


def test_sums_are_formed_wide_and_rounded_once() -> None:
    tiny = 2.0**-8  # half a unit in the last place of 1 in bfloat16: a running sum never gets away from 1
    models = [filled(1.0, torch.bfloat16), filled(tiny, torch.bfloat16), filled(tiny, torch.bfloat16)]
    merged = api.merge(models, weights=[1.0, 1.0, 1.0], parameters={"normalize": False})
    assert all(bool((t == 1 + 2 * tiny).all()) and t.dtype == torch.bfloat16 for t in merged.values())
    tiny = 2.0**-24  # the same for float32, which is summed in float64
    models = [filled(1.0, torch.float32), filled(tiny, torch.float32), filled(tiny, torch.float32)]
    merged = api.merge(models, weights=[1.0, 1.0, 1.0], parameters={"normalize": False})
    assert all(bool((t == 1 + 2 * tiny).all()) and t.dtype == torch.float32 for t in merged.values())


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_the_exact_sum_rounded(dtype: torch.dtype) -> None:
    models = [cast(small(seed), dtype) for seed in range(3)]
    merged = api.merge(models, weights=[0.2, 0.3, 0.5])
    for name in merged:
        exact = sum(w * m[name].double() for w, m in zip([0.2, 0.3, 0.5], models, strict=True))
        assert isinstance(exact, Tensor)
        unit = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(merged[name].double(), exact, rtol=unit * 1.001, atol=1e-7)


def test_c72_each_tensor_has_the_dtype_of_the_base() -> None:
    mixed = cast(small(0), torch.bfloat16)
    mixed = with_tensors(mixed, {"layers.0.norm1.weight": small(0)["layers.0.norm1.weight"].float()})
    models = [mixed, cast(small(1), torch.float16), cast(small(2), torch.float32)]
    for base, model in enumerate(models):
        merged = api.merge(models, base=base)
        for name in merged:
            assert merged.info(name).dtype == merged[name].dtype == model[name].dtype
            exact = torch.stack([m[name].double() for m in models]).mean(0)
            torch.testing.assert_close(merged[name], exact.to(model[name].dtype))
    norm = api.merge(models)["layers.0.norm1.weight"]
    exact = torch.stack([m["layers.0.norm1.weight"].double() for m in models]).mean(0)
    assert torch.equal(norm, exact.float())


@pytest.mark.parametrize("value", [6e4, 1e30])
def test_c72_what_does_not_fit_the_dtype_is_refused(tmp_path: Path, value: float) -> None:
    name = "layers.0.norm2.bias"  # not the first: the type checks of the tests look into mappings there
    base = with_tensors(cast(small(0), torch.float16), {name: torch.full((6,), 6e4, dtype=torch.float16)})
    other = with_tensors(cast(small(1), torch.float32), {name: torch.full((6,), value)})
    merged = api.merge([base, other], weights=[1.0, 1.0], parameters={"normalize": False})
    with pytest.raises(IncompatibleError, match=r"norm2\.bias: .* do not fit in float16"):
        merged.save(tmp_path / "out")
    assert not list(tmp_path.iterdir())
    wide = api.merge([base, other], weights=[1.0, 1.0], parameters={"normalize": False}, base=1)
    assert torch.equal(wide[name], torch.full((6,), 6e4 + value))


def test_c12_integers_never_enter_arithmetic() -> None:
    name = "layers.0.norm1.bias"
    index = torch.tensor([0, 1, 2, 3, 2**53 + 1, 5])
    a, b = (with_tensors(small(seed), {name: index}) for seed in (0, 1))
    merged = api.merge([a, b], weights=[0.9, 0.1])
    assert torch.equal(merged[name], index)
    assert merged[name].dtype == torch.int64
    flags = torch.tensor([True, False, True, True, False, False])
    same = api.merge([with_tensors(small(seed), {name: flags}) for seed in (0, 1)])
    assert torch.equal(same[name], flags)
    for other in (index + 1, index.to(torch.int32), index.double()):
        with pytest.raises(IncompatibleError, match=r"norm1\.bias: torch\.\w+ tensors differ"):
            _ = api.merge([a, with_tensors(small(1), {name: other})])[name]


def test_c12_c13_index_buffers_are_derived_and_left_out(tmp_path: Path) -> None:
    name = "bert.embeddings.position_ids"
    ids = torch.arange(37)[None]
    a, b = MODELS["bert-mlm"](0), MODELS["bert-mlm"](1)
    plain = dict(api.merge([a, b]))
    for models in (
        [with_tensors(a, {name: ids}), with_tensors(b, {name: ids})],
        [with_tensors(a, {name: ids}), b],
        [a, with_tensors(b, {name: ids})],
    ):
        assert_same_bits(dict(api.merge(models)), plain)
    out = api.merge([with_tensors(a, {name: ids}), b]).save(tmp_path / "out")
    assert_complete(out, transformers.BertForMaskedLM)


def assert_complete(folder: Path, kind: type) -> None:
    """Loads through the class with nothing missing, left over or of another shape."""
    _, report = kind.from_pretrained(folder, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(report.values()), report


# ---- heads


def head_pair() -> tuple[Checkpoint, Checkpoint]:
    """A masked language model and a tagger: the same encoder, without pooler."""
    return MODELS["bert-mlm"](0).replace(name="mlm"), MODELS["bert-token"](1).replace(name="tagger")


def body_is_mean(merged: Checkpoint, models: Sequence[Checkpoint]) -> bool:
    names = [name for name in merged if ".encoder.layer." in name or ".embeddings." in name]
    assert len(names) == 37
    return all(torch.equal(merged[n], torch.stack([m[n] for m in models]).mean(0)) for n in names)


def test_c19_heads_that_differ_are_listed() -> None:
    with pytest.raises(IncompatibleError) as error:
        api.merge(head_pair())
    message = str(error.value)
    assert "mlm and tagger" in message
    assert "classifier.weight: absent and (7, 20)" in message
    assert "cls.predictions.bias: (61,) and absent" in message
    assert "drop" in message


def test_c19_heads_of_two_sizes_are_listed() -> None:
    five = of("BertForTokenClassification", "BertConfig", TEXT, num_labels=5)(1)
    with pytest.raises(IncompatibleError, match=r"classifier\.weight: \(7, 20\) and \(5, 20\)"):
        api.merge([MODELS["bert-token"](0), five])


@pytest.mark.parametrize("heads", ["2", "tagger"])
def test_c19_the_head_of_one_model(tmp_path: Path, heads: str) -> None:
    mlm, tagger = head_pair()
    merged = api.merge([mlm, tagger], heads=heads)
    assert merged.keys() == tagger.keys()
    assert merged.config == {**tagger.config, "dtype": "float64"}
    for name in ("classifier.weight", "classifier.bias"):
        assert torch.equal(merged[name], tagger[name])
    assert body_is_mean(merged, [mlm, tagger])
    assert_complete(merged.save(tmp_path / "out"), transformers.BertForTokenClassification)


def test_c19_a_tied_head_of_one_model_stays_tied(tmp_path: Path) -> None:
    mlm, tagger = head_pair()
    merged = api.merge([mlm, tagger], heads="mlm")
    assert merged.keys() == mlm.keys()
    assert torch.equal(merged["cls.predictions.bias"], mlm["cls.predictions.bias"])
    assert body_is_mean(merged, [mlm, tagger])  # the embedding too, which is the decoder
    assert_complete(merged.save(tmp_path / "out"), transformers.BertForMaskedLM)


def test_c19_no_head_at_all(tmp_path: Path) -> None:
    mlm, tagger = head_pair()
    merged = api.merge([mlm, tagger], heads="drop")
    assert not [name for name in merged if name.startswith(("cls", "classifier"))]
    assert "architectures" not in merged.config
    assert body_is_mean(merged, [mlm, tagger])
    lm = api.merge([MODELS["gpt2-lm-untied"](0), MODELS["gpt2-token"](1)], heads="drop")
    assert_complete(lm.save(tmp_path / "out"), transformers.AutoModel)


def test_c19_a_pooler_in_one_model_only() -> None:
    with pytest.raises(IncompatibleError, match=r"2 tensors are in one model only: pooler\.dense\.bias"):
        api.merge([MODELS["bert"](0), MODELS["bert-mlm"](1)])


@pytest.mark.parametrize("heads", ["0", "3", "nobody", ""])
def test_heads_of_nobody(heads: str) -> None:
    with pytest.raises(OptionError, match=r"1 \(mlm\), 2 \(tagger\)"):
        api.merge(head_pair(), heads=heads)


def test_c01_a_tied_and_an_untied_model_are_both_untied() -> None:
    tied, untied = MODELS["gpt2-lm"](0), MODELS["gpt2-lm-untied"](1)
    for models in ([tied, untied], [untied, tied]):
        with pytest.warns(SymfuseWarning, match="is broken, because"):
            merged = api.merge(models)
        assert torch.equal(merged["lm_head.weight"], (tied["transformer.wte.weight"] + untied["lm_head.weight"]) / 2)
        assert merged.config["tie_word_embeddings"] is False
    merged = api.merge([tied, untied], heads="2")
    assert torch.equal(merged["lm_head.weight"], untied["lm_head.weight"])
    assert merged.config["tie_word_embeddings"] is False


@pytest.mark.parametrize(("label", "kind"), [("gpt2-lm", "GPT2LMHeadModel"), ("bert-mlm", "BertForMaskedLM")])
def test_c02_a_tied_merge_grows_no_head(tmp_path: Path, label: str, kind: str) -> None:
    models = [MODELS[label](seed) for seed in (0, 1)]
    sources = [model.save(tmp_path / str(i)) for i, model in enumerate(models)]
    out = api.merge(sources).save(tmp_path / "out")
    merged = open_checkpoint(out)
    assert merged.keys() == models[0].keys()
    assert merged.config["tie_word_embeddings"] is True
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (*sources, out)]
    assert len(set(sizes)) == 1
    assert_complete(out, getattr(transformers, kind))


def test_a_stored_alias_is_merged_once() -> None:
    a, b = MODELS["gpt2-lm"](0), MODELS["gpt2-lm"](1)
    stored = with_tensors(a, {"lm_head.weight": a["transformer.wte.weight"].clone()})
    assert "lm_head.weight" in stored
    assert "lm_head.weight" not in api.merge([stored, b])
    assert "lm_head.weight" not in api.merge([b, stored])


# ---- models that do not go together


def bert(**options: object) -> Checkpoint:
    return of("BertModel", "BertConfig", TEXT, **options)(1)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (lambda: [bert(), MODELS["roberta"]()], "one is a bert, the other a roberta"),  # C15
        (lambda: [bert(), bert(hidden_size=24)], r"hidden sizes \(residual stream\) differ: 20 and 24"),  # C62
        (lambda: [bert(), bert(intermediate_size=31)], "feed-forward sizes differ: 29 and 31"),
        (lambda: [bert(), bert(num_hidden_layers=3)], "numbers of layers differ: 2 and 3"),  # C61
        (lambda: [bert(), bert(num_attention_heads=5)], "numbers of attention heads differ: 4 and 5"),
        (lambda: [encoder(0), encoder(0, num_attention_heads=5)], "numbers of attention heads differ: 4 and 5"),
        (lambda: [bert(), bert(vocab_size=63)], "vocabulary sizes differ: 61 and 63"),  # C05
        (lambda: [bert(), bert(max_position_embeddings=41)], "numbers of positions differ: 37 and 41"),
        (lambda: [bert(hidden_act="relu"), bert(hidden_act="gelu")], "activation|hidden_act"),  # C47
        (lambda: [bert(hidden_act="silu"), bert(hidden_act="gelu")], "hidden_act: 'silu' and 'gelu'"),  # C47
        (lambda: [bert(layer_norm_eps=1e-5), bert()], "layer_norm_eps: 1e-05 and 1e-12"),  # C60
        (lambda: [encoder(0), encoder(1, final_norm=True)], r"in one model only: norm\.bias, norm\.weight"),
    ],
    ids=["c15", "c62", "ffn", "c61", "heads", "heads-fused", "c05", "positions", "c47", "c47-one-group", "c60", "c19"],
)  # fmt: skip
def test_models_that_do_not_go_together(models: object, message: str) -> None:
    assert callable(models)
    pair = models()
    for ordered in (pair, [*pair, pair[0]]):
        with pytest.raises(IncompatibleError, match=message):
            api.merge(ordered)
    with pytest.raises(IncompatibleError):
        api.merge(pair[::-1])


def test_c15_a_prefix_in_one_file(tmp_path: Path) -> None:
    a, b = MODELS["bert"](0), MODELS["bert"](1)
    prefixed = open_checkpoint({f"bert.{n}": t for n, t in b.items()}, config=b.config, name="prefixed")
    merged = api.merge([a, prefixed])
    assert_same_bits(dict(merged), dict(api.merge([a, b])))
    assert_complete(merged.save(tmp_path / "plain"), transformers.AutoModel)
    other = api.merge([prefixed, a])
    assert_same_bits({n.removeprefix("bert."): t for n, t in other.items()}, dict(merged))
    assert all(name.startswith("bert.") for name in other)
    assert_complete(other.save(tmp_path / "prefixed"), transformers.AutoModel)


@pytest.mark.parametrize("models", [[], [0]])
def test_c78_fewer_than_two_models(models: list[int]) -> None:
    if models:  # a copy
        assert_same_bits(dict(api.merge([small(0)])), dict(small(0)))
    else:
        with pytest.raises(OptionError, match="needs models; none"):
            api.merge([])
    with pytest.raises(OptionError, match="two models at least"):
        api.align([small(i) for i in models])


def test_options_that_make_no_sense() -> None:
    with pytest.raises(OptionError, match=r"'mean' is not known.*choose from .*linear"):
        api.merge([small(0), small(1)], method="mean")
    for base in (2, -1):
        with pytest.raises(OptionError, match="there are models 0 to 1"):
            api.merge([small(0), small(1)], base=base)
    for anchor in (2, -1):
        with pytest.raises(OptionError, match="there are models 0 to 1"):
            api.align([small(0), small(1)], anchor=anchor)


# ---- anchors


@pytest.mark.parametrize("label", ["torch-relu-post", "gpt2-lm", "bert-token"])
def test_the_anchor_is_the_model_nearest_to_the_mean(label: str) -> None:
    models = [MODELS[label](seed) for seed in range(4)]
    for chosen in itertools.permutations(range(4), 3):
        group = [models[i] for i in chosen]
        names = [name for name in group[0] if not name.startswith("classifier")]  # the task head does not count
        flat = torch.stack([torch.cat([model[name].flatten() for name in names]) for model in group])
        distances = (flat - flat.mean(0)).norm(dim=1)
        assert api.nearest(group) == int(distances.argmin())


def test_of_two_models_the_last_is_the_anchor() -> None:
    for seeds in itertools.permutations(range(3), 2):
        assert api.nearest([small(seed) for seed in seeds]) == 1


def test_three_models_are_aligned_to_one() -> None:
    models = [of("BertForMaskedLM", "BertConfig", TEXT, **SMALL)(seed) for seed in range(3)]
    for to in (None, 0, 2):
        aligned = api.align(models, to)
        anchor = api.nearest(models) if to is None else to
        assert aligned.anchor == anchor
        assert aligned.checkpoints[anchor] is models[anchor]
        for i, model in enumerate(models):
            alignment, moved = aligned.alignments[i], aligned.checkpoints[i]
            assert (alignment is None) == (i == anchor)
            if alignment is not None:
                assert api.verify(model, moved, alignment).equal
                assert (
                    api.relate(moved, models[anchor]).distance.whole.squared
                    < 0.9 * api.relate(model, models[anchor]).distance.whole.squared
                )


def test_options_of_matching_reach_it() -> None:
    aligned = api.align([small(0), small(1)], axes="ffn", layers="0", scaling=False, biases=False)
    alignment = aligned.alignments[0]
    assert alignment is not None
    assert {instance.axis for instance in alignment.elements} == {"ffn"}
    assert alignment.provenance["options"]["scaling"] is False


def test_a_merge_of_aligned_copies_is_the_model() -> None:
    """Two planted copies and the model: after alignment they agree, and so does their mean."""
    from symfuse.alignment import random_alignment

    model = of("GPT2LMHeadModel", "GPT2Config", GPT2, n_layer=1)(0)
    spec = api.declare(model)
    copies = [random_alignment(spec, seed, {"qk", "v", "ffn"})(model) for seed in (1, 2)]
    merged = api.merge(api.align([*copies, model], anchor=2).checkpoints)
    assert api.verify(model, merged).worst < 1e-12
    assert api.verify(model, api.merge([*copies, model])).worst > 1e-2


def test_c77_nan_in_an_input_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    name = "layers.0.linear1.weight"
    broken = small(1)[name].clone()
    broken[2, 3] = math.nan
    for models in (
        [small(0), with_tensors(small(1), {name: broken})],
        [with_tensors(small(1), {name: broken}), small(0)],
    ):
        with pytest.raises(CheckpointError, match=r"linear1\.weight.* holds 1 NaN"):
            api.merge(models, weights=[0.0, 1.0]).save(tmp_path / "out")
        assert not list(tmp_path.iterdir())


def test_gpt2_heads_hide_behind_equal_shapes() -> None:
    five = of("GPT2LMHeadModel", "GPT2Config", GPT2, n_head=5)(1)
    ours = MODELS["gpt2-lm"](0)
    assert {n: ours.info(n).shape for n in ours} == {n: five.info(n).shape for n in five}
    with pytest.raises(IncompatibleError, match="attention heads differ: 4 and 5"):
        api.merge([ours, five])
