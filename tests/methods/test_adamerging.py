"""AdaMerging: the gradient of its coefficients, what they do to entropy, and how they reach the merge."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from merged import merge_models
from methods.tuned import case, classifier, data, inputs, models
from symfuse.errors import CheckpointError, IncompatibleError, OptionError
from symfuse.evaluation import Task
from symfuse.evaluation.tasks.base import IGNORED, UNKNOWN
from symfuse.methods import Fitted, learn, lookup
from symfuse.methods.adamerging import Mixture
from symfuse.model import Model
from symfuse.modules import live

LAYER = re.compile(r"(?:layer|h|layers)\.(\d+)\.")


def group(name: str, by: str) -> str:
    """As it is said in the record, read off the name."""
    layer = LAYER.search(name)
    found = {"task": "all", "layer": f"layer {layer[1]}" if layer else "outside of layers", "tensor": name}
    return found[by]


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labelled predictions of the entropy in nats, term by term."""
    p = torch.softmax(logits[labels != IGNORED], -1)
    return -(p * p.log()).sum(-1).mean()


def written_out(
    found: list[Model], tasks: list[Task], numbers: list[int], by: str, shares: dict[str, Tensor]
) -> Tensor:
    """The sum of the entropies on one batch of each task, with λ as autograd sees them. shares: [models], by group."""
    modules = [live(model.checkpoint) for model in found]
    base, *tuned = [dict(module.named_parameters()) for module in modules]
    mixed = {
        name: weight.detach()
        + sum(shares[group(name, by)][k] * (one[name] - weight).detach() for k, one in enumerate(tuned))
        for name, weight in base.items()
    }
    total = torch.zeros((), dtype=torch.float64)
    for module, task, number in zip(modules[1:], tasks, numbers, strict=True):
        batch = task.batches[number]
        fields = {n: f.double() if f.is_floating_point() else f for n, f in batch.items() if n != "labels"}
        logits, labels = functional_call(module, mixed, (), fields).logits, batch["labels"]
        total = total + (
            entropy(logits[:, :-1], labels[:, 1:]) if task.name == "causal-lm" else entropy(logits, labels)
        )
    return total


@pytest.mark.parametrize("by", ["layer", "task"])
@pytest.mark.parametrize("label", ["sequence", "token", "masked", "sequence, gpt2", "causal", "image"])
def test_the_gradient_is_that_of_autograd(label: str, by: str) -> None:
    base, task = case(label)
    found = models(base)
    mixture = Mixture(inputs(found, [task, task]), by, torch.float64)
    rng = torch.Generator().manual_seed(1)
    coefficients = torch.rand(2, len(mixture.groups), generator=rng, dtype=torch.float64)
    shares = {name: coefficients[:, i].clone().requires_grad_() for i, name in enumerate(mixture.groups)}
    loss = written_out(found, [task, task], [0, 1], by, shares)
    expected = torch.autograd.grad(loss, list(shares.values()))
    total, gradient = mixture.gradient([task, task], (task.batches[0], task.batches[1]), coefficients)
    torch.testing.assert_close(total, loss.item(), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(gradient, torch.stack(expected, 1), rtol=1e-7, atol=1e-10)
    assert gradient.abs().min() > 1e-6
    again = mixture.gradient([task, task], (task.batches[0], task.batches[1]), coefficients)
    assert again[0] == total
    assert torch.equal(again[1], gradient)  # nothing is left of the first


def test_the_gradient_is_that_of_finite_differences() -> None:
    base = classifier()
    found, tasks = models(base), [data(base), data(base, first=1)]
    mixture = Mixture(inputs(found, tasks), "layer", torch.float64)
    coefficients = torch.full((2, 3), 0.3, dtype=torch.float64)
    batches = (tasks[0].batches[1], tasks[1].batches[2])
    _, gradient = mixture.gradient(tasks, batches, coefficients)
    step = 1e-5
    for place in [(k, group) for k in range(2) for group in range(3)]:
        ends = []
        for sign in (1, -1):
            moved = coefficients.clone()
            moved[place] += sign * step
            ends.append(mixture.gradient(tasks, batches, moved)[0])
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), gradient[place].item(), rtol=1e-5, atol=1e-9)


def learned(found: list[Model], tasks: list[Task], **options: Any) -> Fitted:
    heads, seed = options.pop("heads", "average"), options.pop("seed", 0)
    given = learn(lookup("adamerging"), found, base=0, tasks=tasks, parameters=options, heads=heads, seed=seed)
    assert given is not None
    return given


@pytest.mark.parametrize("by", ["task", "layer", "tensor"])
def test_the_entropy_falls(by: str) -> None:
    base = classifier()
    found, tasks = models(base), [data(base), data(base, first=1)]
    record = learned(found, tasks, by=by, steps=20, rate=0.05).learned.record
    assert sum(record["entropy"]["after"]) < 0.99 * sum(record["entropy"]["before"])
    shares = torch.tensor(list(record["coefficients"].values()))
    assert shares.shape == ({"task": 1, "layer": 3, "tensor": len(found[0].spec.tensors)}[by], 2)
    assert bool(((shares >= 0) & (shares <= 1)).all())
    assert record["steps"] == 20
    start = learned(found, tasks, by=by, steps=1, rate=1e-12).learned.record
    torch.testing.assert_close(start["entropy"]["before"], record["entropy"]["before"], rtol=0.0, atol=0.0)


def test_the_recorded_entropy_is_that_of_the_merged_model() -> None:
    base = classifier()
    found, tasks = models(base), [data(base), data(base, first=1)]
    given = learned(found, tasks, steps=5, rate=0.05)
    module = live(merge_models(found, method="adamerging", base=0, learned=given))
    for task, after in zip(tasks, given.learned.record["entropy"]["after"], strict=True):
        values = []
        for batch in task.batches:
            logits = module(**{n: f for n, f in batch.items() if n != "labels"}).logits
            values += [entropy(one, torch.zeros(())).item() for one in logits]
        torch.testing.assert_close(sum(values) / len(values), after, rtol=1e-4, atol=0.0)


def test_one_layer_of_which_nothing_else_differs() -> None:
    base = classifier(layers=1)
    found = models(base)
    tensors = [{n: one.checkpoint[n] if LAYER.search(n) else base[n] for n in base} for one in found]
    found = [Model.of(base.replace(tensors=one)) for one in tensors]
    tasks = [data(base), data(base, first=1)]
    one, other = (learned(found, tasks, by=by, steps=7, rate=0.03).learned for by in ("task", "layer"))
    assert one.record["coefficients"]["all"] == other.record["coefficients"]["layer 0"] != [0.3, 0.3]
    assert other.record["coefficients"]["outside of layers"] == [0.3, 0.3]
    assert one.record["entropy"] == other.record["entropy"]


@pytest.mark.parametrize("by", ["task", "layer", "tensor"])
def test_the_merge_is_what_was_learned(by: str) -> None:
    base = classifier()
    found, tasks = models(base), [data(base), data(base, first=1)]
    given = learned(found, tasks, by=by, steps=5, rate=0.05)
    merged = merge_models(found, method="adamerging", base=0, learned=given)
    shares = given.learned.record["coefficients"]
    assert len({tuple(one) for one in shares.values()}) == len(shares)
    by_file = {found[0].spec.file_name(name): name for name in found[0].spec.tensors}
    for file, tensor in merged.items():
        share = shares[group(by_file[file], by)]
        vectors = [model.checkpoint[file] - base[file] for model in found[1:]]
        expected = base[file] + share[0] * vectors[0] + share[1] * vectors[1]
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-14)


def test_labels_are_not_read() -> None:
    base = classifier()
    found, tasks = models(base), [data(base), data(base, first=1)]
    first = learned(found, tasks, steps=4, rate=0.05).learned.record
    for change in (lambda labels: (labels + 3) % 7, lambda labels: torch.full_like(labels, UNKNOWN)):
        others = [type(t)([b | {"labels": change(b["labels"])} for b in t.batches]) for t in tasks]
        assert learned(found, others, steps=4, rate=0.05).learned.record == first


def test_the_seed_decides_the_order_of_batches() -> None:
    base = classifier()
    found, tasks = models(base), [data(base, batch_size=1), data(base, first=1, batch_size=1)]
    one, again, other = (learned(found, tasks, steps=4, rate=0.05, seed=seed).learned.record for seed in (1, 1, 2))
    assert one == again
    assert one["coefficients"] != other["coefficients"]
    assert one["entropy"]["before"] == other["entropy"]["before"]


def test_models_keep_their_heads() -> None:
    """Of other numbers of labels even; they stand on their own data, and no λ is theirs."""
    base, few = classifier(), classifier(labels=3)
    near_base, near_few = models(base)[1], models(few, count=2)[2]
    body = {n: t for n, t in base.items() if not n.startswith("classifier")}
    shared = {n: t + (near_few.checkpoint[n] - few[n]) for n, t in body.items()}  # few is of other random weights
    other = Model.of(few.replace(tensors={**dict(near_few.checkpoint), **shared}, name="few"))
    found, tasks = [Model.of(base), near_base, other], [data(base), data(few, first=1)]
    given = learned(found, tasks, by="tensor", steps=3, rate=0.05, heads="drop")
    coefficients = given.learned.record["coefficients"]
    assert not any(name.startswith("classifier") for name in coefficients)
    merged = merge_models(found, method="adamerging", base=0, heads="drop", learned=given)
    for model, task, after in zip(found[1:], tasks, given.learned.record["entropy"]["after"], strict=True):
        head = {n: model.checkpoint[n] for n in model.checkpoint if n.startswith("classifier")}
        module = live(model.checkpoint.replace(tensors={**{n: merged[n] for n in merged}, **head}))
        logits = [module(**{n: f for n, f in batch.items() if n != "labels"}).logits for batch in task.batches]
        values = torch.stack([entropy(one, torch.zeros(())) for one in torch.cat(logits)])
        torch.testing.assert_close(values.mean().item(), after, rtol=1e-4, atol=0.0)
    with pytest.raises(IncompatibleError, match=r"classifier.* has shape \[3(, 20)?\], expected \[7(, 20)?\]"):
        learned(found, tasks)


def test_a_base_without_a_head() -> None:
    base = classifier()
    found, tasks = models(base), [data(base)] * 2
    names = {n.removeprefix("bert."): t for n, t in base.items() if n.startswith("bert.")}
    found[0] = Model.of(
        base.replace(tensors=names, config={**base.config, "architectures": ["BertModel"]}, name="bare")
    )
    given = learned(found, tasks, steps=2, rate=0.05, heads="2")
    whole = learned(models(base), tasks, steps=2, rate=0.05, heads="2")
    assert given.learned.record == whole.learned.record
    with pytest.raises(IncompatibleError, match=r"bare has no classifier.*choose `heads`"):
        learned(found, tasks)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"by": "layers"}, "by is 'layers' .did you mean 'layer'?"),
    ({"steps": 0}, "steps is 0; expected at least 1"),
    ({"rate": 0.0}, "rate is 0, expected a number above 0"),
    ({"start": 1.5}, "start is 1.5, expected 0 to 1"),
    ({"start": "much"}, "start is 'much', expected a finite number"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_wrong_parameters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        learned(models(classifier()), [data(classifier())] * 2, **options)


def test_what_there_must_be() -> None:
    base = classifier()
    found, task = models(base), data(base)
    with pytest.raises(OptionError, match="needs a base model"):
        learn(lookup("adamerging"), found[1:], tasks=[task, task])
    with pytest.raises(OptionError, match="needs data, and there are none"):
        learn(lookup("adamerging"), found, base=0)
    number, records = case("regression")
    with pytest.raises(OptionError, match="predicts a number; the entropy needs classes"):
        learned(models(number), [records] * 2)


def test_numbers_that_overflow() -> None:
    base = classifier()
    huge = base.replace(tensors={**base, "classifier.bias": torch.full_like(base["classifier.bias"], 2e38)})
    with pytest.raises(CheckpointError, match="gradient is not finite"):
        learned([Model.of(base), Model.of(huge), Model.of(huge)], [data(base)] * 2, start=1.0)


def test_entropy_that_does_not_fall_is_said() -> None:
    base = classifier()
    found, tasks = models(base), [data(base)] * 2
    assert learned(found, tasks, steps=10, rate=0.02).learned.notes == ()
    still = [Model.of(base)] * 3
    (note,) = learned(still, tasks, steps=1).learned.notes
    assert "did not fall in 1 steps" in note
