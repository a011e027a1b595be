"""What learning leaves as it is, what teaches it, and what it cannot be asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path as Folder
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.tiny import real
from evaluation import task_cases
from matching.learned.learning_cases import groups_of, history, identity, learning, model, planted, same, task
from symfuse import api
from symfuse.alignment import Alignment
from symfuse.errors import DataError, OptionError
from symfuse.evaluation import Task, open_space
from symfuse.evaluation.tasks.base import IGNORED, UNKNOWN
from symfuse.io import Checkpoint
from symfuse.matching.learned import Progress, match_learned, objective
from symfuse.matching.learned.latents import WARM, Latents
from symfuse.matching.learned.objective import Objective
from symfuse.matching.learned.path import Path
from symfuse.model import Model


def moved_names(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


def found(label: str = "bert", **options: Any) -> Alignment:
    """Learned from nothing, on a planted pair."""
    own = {"rate": 0.02} | options.pop("own", {})
    chosen = {"axes": "attention", "start": identity(label)} | options
    return match_learned(Model.of(planted(label)), Model.of(model(label)), learning(label, **own), **chosen)


# ---- what is left


def test_without_biases_there_are_no_translations_and_no_gauges() -> None:
    g = found(biases=False)
    assert g.elements
    assert dict(g.shifts) == dict(g.gauges) == {}
    assert not any("bias" in name for name in g.shifted)


@pytest.mark.slow
def test_with_biases_there_are_both() -> None:
    g = found()
    assert g.shifts
    assert g.gauges
    assert api.prove(planted("bert"), g).exact.worst < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("anchor", ["universe", 1])
def test_without_biases_of_both_models(anchor: Any) -> None:
    aligned = api.align(
        [planted("bert"), model("bert")], anchor=anchor, axes="attention", biases=False, learn=learning("bert")
    )
    for g in aligned.alignments:
        assert g is None or (dict(g.shifts), dict(g.gauges)) == ({}, {})


@pytest.mark.parametrize("label", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_of_one_layer_nothing_of_the_other_moves(label: str) -> None:
    g = found(label, layers="0", own={"steps": 5})
    source = planted(label)
    changed = moved_names(g(source), source)
    mark = {"bert": "encoder.layer.0.", "gpt2": "transformer.h.0."}[label]
    assert changed
    assert all(mark in name for name in changed)
    assert {i.index for i in g.elements} == {(0,)}


@pytest.mark.parametrize("variant", ["heads-ignored", pytest.param("transport", marks=pytest.mark.slow)])
def test_inexact_variants_are_refused_of_several_too(variant: str) -> None:
    pair = [model("bert", 1), model("bert")]
    for anchor in (1, None, "universe"):
        with pytest.raises(OptionError, match=f"variants {variant}: what is learned keeps the function"):
            api.align(pair, anchor=anchor, axes="attention", variants=(variant,), learn=learning("bert"))  # type: ignore[arg-type]


# ---- the models' own predictions


def says(checkpoint: Checkpoint, number: int) -> Tensor:
    """The probabilities of the classes that the real class predicts on a batch."""
    batch = {name: t for name, t in task("bert").batches[number].items() if name != "labels"}
    with torch.no_grad():
        return real(checkpoint)(**batch).logits.softmax(-1)


@pytest.mark.parametrize("permutations", ["annealed", "kept"])
def test_teachers_are_the_models_as_they_were(permutations: Any, tmp_path: Folder) -> None:
    """Before and after the latents are moved; while what is annealed is far from what it begins as."""
    spec, pair = Model.of(model("bert")).spec, [planted("bert"), model("bert", 1)]
    space = open_space(pair, ["a", "b"], task("bert"), tmp_path, dtype=torch.float64)
    latents = [Latents.of(spec, groups_of(spec), permutations, torch.float64, "cpu") for _ in pair]
    path = Path(space, [Model.of(one) for one in pair], latents, "cpu")
    taught = Objective(path, task("bert"), 1.0)
    expected = [[says(one, number) for one in pair] for number in (0, 1)]
    torch.testing.assert_close(taught._taught(task("bert").batches[0]), expected[0], rtol=1e-9, atol=1e-12)
    rng = torch.Generator().manual_seed(0)
    for one in latents:
        for leaf in one.leaves.values():
            leaf.data += 0.3 * torch.randn(leaf.shape, generator=rng, dtype=torch.float64)
    for number in (0, 1):
        found = taught._taught(task("bert").batches[number])
        torch.testing.assert_close(found, expected[number], rtol=1e-9, atol=1e-12)
    if permutations == "annealed":
        soft = path.aligned(WARM)
        with torch.no_grad():
            logits, _ = path.at(soft, (1.0, 0.0), task("bert").predicted, task("bert").batches[0])  # type: ignore[attr-defined]
        assert float((logits.softmax(-1) - expected[0][0]).abs().max()) > 1e-3


class StoppedError(Exception):
    """What the callback raises."""


def stop(progress: Progress) -> None:
    if progress.step == 4:
        raise StoppedError


@pytest.mark.slow
@pytest.mark.parametrize("permutations", ["kept", "annealed"])
@pytest.mark.parametrize("distil", [0.5, 1.0])
def test_it_goes_on_bitwise(distil: float, permutations: str, tmp_path: Folder) -> None:
    own = {"steps": 4, "every": 2, "distil": distil, "permutations": permutations}
    journal = tmp_path / "run.pt"
    with pytest.raises(StoppedError):
        found(own=own | {"journal": journal, "progress": stop})
    assert journal.exists()
    again, whole = found(own=own | {"journal": journal}), found(own=own)
    assert history(again) == history(whole)
    assert same(again, whole)


def relabelled(kind: str, label: int) -> Task:
    return task(kind).part([{**b, "labels": torch.full_like(b["labels"], label)} for b in task(kind).batches])


def test_with_distil_at_one_no_label_is_read() -> None:
    """Nor one that nobody knows; and the barrier between a model and its planted copy falls."""
    own: dict[str, Any] = {"distil": 1.0, "rate": 0.05}
    g = found("llama", own=own)
    other = found("llama", own=own | {"task": relabelled("llama", UNKNOWN)})
    assert min(history(g)) < 0.5 * history(g)[0]
    assert history(g) == history(other)
    assert g.elements.keys() == other.elements.keys()
    for instance, element in g.elements.items():
        assert torch.equal(element.to_dense(), other.elements[instance].to_dense())


@pytest.mark.slow
def test_with_less_they_are() -> None:
    """The comparison above can fail."""
    assert history(found(own={"distil": 0.5})) != history(found(own={"distil": 0.5, "task": relabelled("bert", 0)}))


@pytest.mark.slow
def test_predictions_that_are_not_kept_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"distil": 0.5, "steps": 6, "every": 3}
    kept = found(own=own)
    monkeypatch.setattr(objective, "KEPT", 0)
    assert same(found(own=own), kept)


def test_how_much_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Folder) -> None:
    pair = [planted("bert"), model("bert", 1)]
    space = open_space(pair, ["a", "b"], task("bert"), tmp_path, dtype=torch.float64)
    path = Path(space, [Model.of(one) for one in pair], [None, None], "cpu")
    one = sum(p.nbytes for p in Objective(path, task("bert"), 1.0)._taught(task("bert").batches[0]))
    for limit, count in ((0, 0), (one - 1, 0), (one, 1), (2 * one, 2)):
        monkeypatch.setattr(objective, "KEPT", limit)
        taught = Objective(path, task("bert"), 1.0)
        values = [taught((path.aligned()), (0.3, 0.7), batch)[0] for batch in task("bert").batches[:3]]
        assert len(taught.taught) == count
        again = [taught((path.aligned()), (0.3, 0.7), batch)[0] for batch in task("bert").batches[:3]]
        assert [v.item() for v in values] == [v.item() for v in again]


# ---- what it cannot be asked for


@pytest.mark.parametrize("distil", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_a_retrieval_has_no_classes_to_teach(distil: float) -> None:
    data, anchor = task_cases.task("retrieval"), task_cases.CASES["retrieval"][1]()
    source = anchor.replace(name="source")
    own = learning("bert", task=data, validation=data, distil=distil, steps=1)
    with pytest.raises(OptionError, match=r"learning: retrieval predicts no classes, .*leave distil at 0"):
        api.match(source, anchor, axes="attention", learn=own)


@pytest.mark.slow
def test_but_a_loss_to_descend() -> None:
    data, anchor = task_cases.task("retrieval"), task_cases.CASES["retrieval"][1]()
    own = learning("bert", task=data, validation=data, steps=2, every=2)
    g = api.match(anchor.replace(name="source"), anchor, axes="attention", learn=own)
    assert len(history(g)) == 2


@pytest.mark.parametrize("device", ["foo", "foo:1", "", "meta:x", "cpu:cpu"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"learning: device {device!r} cannot be used (")):
        learning("bert", device=device)


@pytest.mark.parametrize("device", ["cuda:99" if torch.cuda.is_available() else "cuda", "cuda:99"])
def test_devices_that_are_not_there_are_refused(device: str) -> None:
    with pytest.raises(OptionError, match=f"learning: device '{device}' cannot be used"):
        learning("bert", device=device)


@pytest.mark.parametrize("distil", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_validation_data_that_ask_for_nothing(distil: float) -> None:
    nothing = relabelled("bert", IGNORED)
    with pytest.raises(DataError, match=r"learning: random tokens 0 asks for nothing, .*name other data"):
        found(own={"validation": nothing, "distil": distil})
