"""Fisher merging against the formula, and what its statistics are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import symfuse
from contract.tiny import MODELS, TEXT, of
from evaluation.task_cases import CASES, task
from methods.guided_cases import beside, pair
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import DataError, IncompatibleError, OptionError, SymmetryError
from symfuse.evaluation import Task
from symfuse.evaluation.tasks import TASKS, make_task
from symfuse.evaluation.tasks.base import IGNORED
from symfuse.io import Checkpoint
from symfuse.io.lazy import StoredTensors
from symfuse.methods.fisher import fisher_of, log_likelihood, sampled, uniforms
from symfuse.model import Model
from symfuse.modules import canonical_names, live
from symfuse.stats.statistics import Statistics
from symfuse.transporting.statistics import transported_statistics


def halves(label: str = "sequence") -> tuple[Task, Task]:
    return task(label, batch_size=4, limit=9, seed=1), task(label, batch_size=3, limit=11, seed=2)


def by_hand(checkpoint: Checkpoint, data: Task, labels: str = "given") -> dict[str, Tensor]:
    """The mean of squared gradients, example after example, by autograd alone."""
    module = live(checkpoint, torch.float32)
    loss = log_likelihood(data, labels, 0)  # type: ignore[arg-type]
    sums = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    count = 0
    for batch in data.batches:
        for i in range(len(batch["labels"])):
            one = {name: field[i : i + 1] for name, field in batch.items()}
            module.zero_grad()
            loss(module, one).backward()
            for name, p in module.named_parameters():
                sums[name] += p.grad.square() if p.grad is not None else 0
            count += 1
    names = canonical_names(Model.of(checkpoint), module)
    return {names[name]: total / count for name, total in sums.items()}


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """To what float32 gradients are good for; those of key biases are nothing but rounding."""
    top = max(float(tensor.max()) for tensor in expected.values())
    for name in found:
        torch.testing.assert_close(found[name].float(), expected[name], rtol=2e-3, atol=1e-7 * top)


@pytest.mark.parametrize("labels", ["given", "sampled"])
@pytest.mark.parametrize("label", ["sequence", pytest.param("token", marks=pytest.mark.slow),
                                   pytest.param("image", marks=pytest.mark.slow),
                                   pytest.param("causal", marks=pytest.mark.slow)])  # fmt: skip
def test_the_statistics_are_the_mean_of_squared_gradients(label: str, labels: str) -> None:
    a, _ = pair(label)
    data = task(label, batch_size=4, limit=9)
    found = symfuse.collect(a, data, "fisher", labels=labels)
    expected = by_hand(a, data, labels)
    names = {name: name for name in expected if name in found.tensors}
    assert len(names) > 20
    assert found.count == sum(len(batch["labels"]) for batch in data.batches)
    assert_near({name: found.tensors[name] for name in names}, expected)
    total = sum(float(found.tensors[name].sum()) for name in names)
    assert total > 0  # the expected score under detached probabilities would be zero everywhere


def test_the_merge_is_the_formula() -> None:
    a, b = pair()
    one, two = halves()
    merged = symfuse.merge([a, b], method="fisher", data=[one, two], weights=[1.0, 2.0], parameters={"floor": 1e-3})
    fishers = [fisher_of(Model.of(c), t) for c, t in ((a, one), (b, two))]
    for file in merged:
        name = file.removeprefix("bert.")
        wide = [c[file].double() for c in (a, b)]
        if name not in fishers[0].tensors:
            expected = (wide[0] + 2 * wide[1]) / 3
        else:
            mean = sum(float(t.double().sum()) for f in fishers for t in f.tensors.values())
            mean /= sum(t.numel() for f in fishers for t in f.tensors.values())
            fa, fb = (f.tensors[name].double().clamp(min=1e-3 * mean) for f in fishers)
            expected = (fa * wide[0] + 2 * fb * wide[1]) / (fa + 2 * fb)
        torch.testing.assert_close(merged[file].double(), expected.double(), rtol=1e-6, atol=1e-9)
    plain = symfuse.merge([a, b], weights=[1.0, 2.0])
    assert any((merged[name] - plain[name]).abs().max() > 1e-3 for name in merged)


def test_where_nothing_is_known_it_is_the_weighted_mean() -> None:
    a, b = pair()
    empty = [symfuse.collect(c, halves()[0], "fisher") for c in (a, b)]
    name = "bert.encoder.layer.0.output.dense.weight"
    for one in empty:
        one.tensors[name.removeprefix("bert.")].zero_()  # type: ignore[attr-defined]
    for floor in (0.0, 1e-6):
        merged = symfuse.merge(
            [a, b], method="fisher", statistics=empty, weights=[1.0, 3.0], parameters={"floor": floor}
        )
        torch.testing.assert_close(merged[name], (a[name] + 3 * b[name]) / 4, rtol=1e-6, atol=1e-7)
        assert all(torch.isfinite(merged[n]).all() for n in merged)


def test_scales_make_fishers_of_other_size_equal() -> None:
    a, b = pair()
    found = symfuse.collect(a, halves()[0], "fisher")
    fisher = replace(found, provenance={})  # of no model in particular
    large = replace(fisher, tensors={name: 100 * tensor for name, tensor in fisher.tensors.items()})
    for scale in ("mean", "norm"):
        merged = symfuse.merge([a, b], method="fisher", statistics=[fisher, large], parameters={"scale": scale})
        plain = symfuse.merge([a, b])
        for name in merged:
            torch.testing.assert_close(merged[name], plain[name], rtol=1e-5, atol=1e-6)
    name = "bert.encoder.layer.0.output.dense.weight"
    merged = symfuse.merge([a, b], method="fisher", statistics=[fisher, large])
    torch.testing.assert_close(merged[name], (a[name] + 100 * b[name]) / 101, rtol=1e-3, atol=1e-4)


def test_sampled_labels_depend_on_the_example_alone() -> None:
    a, _ = pair()
    found = [symfuse.collect(a, task("sequence", batch_size=size), "fisher", seed=3) for size in (1, 7)]
    other = symfuse.collect(a, task("sequence", batch_size=7), "fisher", seed=4)
    assert_near(found[0].tensors, found[1].tensors)
    assert any(not torch.equal(found[1].tensors[name], other.tensors[name]) for name in other.tensors)


def test_labels_are_sampled_as_the_model_predicts() -> None:
    logits = torch.tensor([1.0, -1.0, 0.5, -30.0]).expand(20_000, 4)
    drawn = sampled(logits, torch.rand(20_000, generator=torch.Generator().manual_seed(0)))
    shares = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(shares, logits[0].softmax(-1), rtol=0, atol=0.015)
    assert sampled(logits[:2], torch.tensor([0.0, 1.0 - 1e-5])).tolist() == [0, 2]


def test_padding_changes_no_draw() -> None:
    data = task("token", batch_size=4)
    batch = next(b for b in data.batches if b["input_ids"].shape[1] < 20)
    wide = {n: nn.functional.pad(f, (0, 3), value=IGNORED if n == "labels" else 0) for n, f in batch.items()}
    shape = batch["labels"].shape
    ours, theirs = uniforms(batch, shape, 5), uniforms(wide, wide["labels"].shape, 5)
    assert torch.equal(ours, theirs[:, : shape[1]])
    assert len({float(row[0]) for row in ours}) == len(ours)


def test_unlabelled_data_have_an_expected_fisher_and_no_empirical_one() -> None:
    a, _ = pair()
    name, checkpoint, records, _ = CASES["sequence"]
    data = make_task(name, records(), checkpoint(), batch_size=4, unlabelled=True)
    labelled = symfuse.collect(a, task("sequence", batch_size=4), "fisher")
    found = symfuse.collect(a, data, "fisher")
    assert all(torch.equal(found.tensors[n], labelled.tensors[n]) for n in found.tensors)
    with pytest.raises(DataError, match="read without their labels"):
        symfuse.collect(a, data, "fisher", labels="given")


def permuted(checkpoint: Checkpoint, axes: tuple[str, ...]) -> Alignment:
    return random_alignment(symfuse.declare(checkpoint), 2, axes=axes)


def test_of_an_aligned_model_they_are_the_transported_ones() -> None:
    a, _ = pair()
    data = task("sequence", batch_size=4, limit=9)
    alignment = permuted(a, ("ffn", "h"))
    before = symfuse.collect(a, data, "fisher", labels="given")
    moved, anew = (
        transported_statistics(before, alignment),
        symfuse.collect(alignment(a), data, "fisher", labels="given"),
    )
    assert_near(moved.tensors, anew.tensors)
    name = "encoder.layer.0.intermediate.dense.weight"
    assert not torch.allclose(before.tensors[name], anew.tensors[name], rtol=1e-2, atol=0.0)
    with pytest.raises(SymmetryError, match="rotated"):
        transported_statistics(before, permuted(a, ("qk",)))


def test_statistics_taken_before_matching_are_not_those_of_the_aligned_model() -> None:
    a, b = pair()
    data, alignment = task("sequence", batch_size=4, limit=9), permuted(a, ("ffn",))
    before = [symfuse.collect(c, data, "fisher") for c in (a, b)]
    right = symfuse.merge(
        [alignment(a), b], method="fisher", statistics=[transported_statistics(before[0], alignment), before[1]]
    )
    with pytest.raises(IncompatibleError, match="another model"):
        symfuse.merge([alignment(a), b], method="fisher", statistics=before)
    nameless = replace(before[0], provenance={})
    wrong = symfuse.merge([alignment(a), b], method="fisher", statistics=[nameless, before[1]])
    assert any((right[name] - wrong[name]).abs().max() > 1e-3 for name in right)


def test_what_cannot_be_is_said(tmp_path) -> None:  # type: ignore[no-untyped-def]
    a, b = pair()
    data = task("sequence", batch_size=4, limit=9)
    saved = symfuse.collect(a, data, "fisher")
    saved.save(tmp_path / "f")
    kept = Statistics.load(tmp_path / "f")
    assert all(torch.equal(kept.tensors[n], saved.tensors[n]) for n in saved.tensors)
    calls = [
        ({}, "needs data, and there are none"),
        ({"data": [data]}, "1 data for 2 models"),
        ({"data": data, "parameters": {"labels": "guessed"}}, "labels is 'guessed'"),
        ({"data": data, "parameters": {"scale": "max"}}, "scale is 'max'"),
        ({"data": data, "parameters": {"floor": -1.0}}, "at least 0"),
        ({"data": data, "weights": [1.0, -1.0]}, "at least 0"),
        ({"data": task("retrieval")}, "needs a task that predicts classes"),
    ]
    for options, words in calls:
        with pytest.raises(OptionError, match=words):
            symfuse.merge([a, b], method="fisher", **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="does not use data"):
        symfuse.merge([a, b], data=data)
    with pytest.raises(OptionError, match="there are no statistics 'fishr'"):
        symfuse.collect(a, data, "fishr")
    regression, numbers = pair("regression")
    with pytest.raises(OptionError, match="predicts a number"):
        symfuse.merge([regression, numbers], method="fisher", data=task("regression"))


def test_equal_models_stay_as_they_are() -> None:
    a, _ = pair()
    data = halves()
    merged = symfuse.merge([a, a.replace(name="twin")], method="fisher", data=list(data))
    assert all(torch.equal(merged[name], a[name]) for name in a)
    order = [symfuse.merge(list(m), method="fisher", data=list(d)) for m, d in (
        (pair(), data), (pair()[::-1], data[::-1])
    )]  # fmt: skip
    assert all(torch.equal(x[name], y[name]) for x, y in pairwise(order) for name in a)


@pytest.mark.parametrize(
    "label", ["deberta-sequence", "mixtral-lm", pytest.param("bart-sequence", marks=pytest.mark.slow)]
)
def test_models_that_no_fast_way_covers_go_one_by_one(label: str) -> None:
    """Through tasks, whose own words for what a model cannot run must not hide that the fast way is not for it."""
    checkpoint = MODELS[label]()
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (4, 9), generator=rng)
    if label == "bart-sequence":
        ids[:, -1] = checkpoint.config["eos_token_id"]
    lm = label.endswith("lm")
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids if lm else torch.tensor([0, 1, 2, 3]),
    }
    data = TASKS["causal-lm" if lm else "sequence-classification"]([batch])
    found = symfuse.collect(checkpoint, data, labels="given")
    if label != "bart-sequence":
        assert "one by one" in found.provenance["notes"][0]
    assert_near(found.tensors, by_hand(checkpoint, data))


def test_scales_and_floors_are_of_the_transported_information() -> None:
    """Where an alignment rescales units, their information is rescaled, and with it its mean and norm."""
    relu = of("BertForSequenceClassification", "BertConfig", TEXT, hidden_act="relu")()
    rng = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(3, 40, (8, 9), generator=rng),
        "attention_mask": torch.ones(8, 9, dtype=torch.long),
        "labels": torch.arange(8) % 7,
    }
    data = TASKS["sequence-classification"]([batch])
    alignment = random_alignment(symfuse.declare(relu), 1, axes=("ffn",), largest=True)
    aligned, other = alignment(relu), beside(relu, 0.1, 1, "b")
    before, of_other = (symfuse.collect(c, data, "fisher", labels="given") for c in (relu, other))
    moved, anew = transported_statistics(before, alignment), symfuse.collect(aligned, data, "fisher", labels="given")
    for key in ("mean", "norm"):
        assert abs(before.totals[key] / anew.totals[key] - 1) > 1e-2
        assert abs(moved.totals[key] / anew.totals[key] - 1) < 1e-5
    for parameters in ({"scale": "mean"}, {"scale": "norm"}, {"floor": 0.1}):
        right, found = (
            symfuse.merge([aligned, other], method="fisher", statistics=[s, of_other], parameters=parameters)
            for s in (anew, moved)
        )
        for name in right:
            assert_close(found[name], right[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("label", ["mixtral-lm", "olmoe-lm"])
def test_files_with_one_tensor_per_expert_are_weighed_as_their_stack_is(label: str, tmp_path: Path) -> None:
    """Each piece by the importance of its own part of the stack."""
    a = MODELS[label]()
    a.save(tmp_path / "a")
    beside(a, 0.1, 1, "b").save(tmp_path / "b")
    models = [Model.of(symfuse.open(tmp_path / name)) for name in "ab"]
    spec, rng = models[0].spec, torch.Generator().manual_seed(0)
    stacks = [name for name in spec.stacks if name.endswith("gate_up_proj")]
    tensors = [{n: torch.rand(m.read(n).shape, generator=rng) + 0.1 for n in stacks} for m in models]
    given = [Statistics("fisher", one, 100) for one in tensors]
    merged = symfuse.merge([str(tmp_path / name) for name in "ab"], method="fisher", statistics=given)
    for stack in stacks:
        fa, fb = (one[stack].double() for one in tensors)
        expected = (fa * models[0].read(stack) + fb * models[1].read(stack)) / (fa + fb)
        pieces = [merged[file].double() for file in spec.stored(stack)]  # gate and up of the first expert, then
        found = torch.stack([torch.cat(pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)])
        assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_in_use_they_may_wait_in_files(tmp_path: Path) -> None:
    a, _ = pair()
    data, model = halves()[0], Model.of(a)
    kept, written = fisher_of(model, data, seed=2), fisher_of(model, data, seed=2, scratch=tmp_path)
    assert len(list(tmp_path.glob("layer-*.safetensors"))) == 2
    assert isinstance(written.tensors, StoredTensors)
    assert (written.name, written.count, written.provenance) == (kept.name, kept.count, kept.provenance)
    assert all(torch.equal(written.read(name), kept.read(name)) for name in kept.tensors)
