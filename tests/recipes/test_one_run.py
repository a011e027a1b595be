"""One run: models opened, prepared and planned once; its events; `symfuse.merge` as a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import symfuse
from command import done, run
from contract.tiny import MODELS
from symfuse import api
from symfuse.api import events
from symfuse.errors import OptionError, SymfuseWarning
from symfuse.recipes import parse_recipe
from symfuse.recipes import run as running
from symfuse.recipes import stage as stages
from symfuse.runs import record_of


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("abc"):
        MODELS["bert-mlm"](seed).save(name)
    return tmp_path


def recipe(*names: str, **keys: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": name} for name in names], **keys}


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    calls: list[str] = []
    function: Callable[..., Any] = getattr(module, name)

    def call(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return function(*args, **options)

    monkeypatch.setattr(module, name, call)
    return calls


@pytest.mark.parametrize(("keys", "plans"), [({}, 1), ({"align": {"axes": "ffn", "anchor": 1}}, 2)])
def test_a_recipe_is_opened_prepared_and_planned_once(
    models: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], plans: int
) -> None:
    """Aligned models are planned again: whether they fit is known before they are matched."""
    opened = counted(monkeypatch, stages, "_open")
    prepared, planned = (counted(monkeypatch, running, name) for name in ("prepare", "plan"))
    symfuse.merge_recipe(recipe("a", "b", **keys))
    assert (len(opened), len(prepared), len(planned)) == (2, 1, plans)


def test_the_events_of_a_run_in_order(models: Path) -> None:
    heard: list[events.Event] = []
    merged = symfuse.merge_recipe(recipe("a", "b", "c", align={"axes": "ffn", "anchor": 3}), follow=heard.append)
    kinds = [type(event).__name__ for event in heard if not isinstance(event, events.Step)]
    pair = ["Working", "AlignmentDone"]
    assert [kind for kind in kinds if kind not in ("Note", "Warned")] == ["Planned", "Anchored", *pair, *pair]
    planned = heard[0]
    assert isinstance(planned, events.Planned)
    assert planned.last
    assert planned.report.possible
    assert planned.report.cost is not None
    assert planned.merged.keys() == merged.keys()
    assert any(isinstance(event, events.Step) for event in heard)
    done_ = [event.record.run for event in heard if isinstance(event, events.AlignmentDone)]
    record = record_of(merged)
    assert record is not None
    assert [one["source"]["name"] for one in done_] == ["a", "b"]
    assert record.run["alignments"] == done_


def test_a_proof_is_an_event(models: Path) -> None:
    heard: list[events.Event] = []
    aligned = symfuse.align(["a", "b"], 1, axes="ffn", prove=True, follow=heard.append)
    proof = next(event for event in heard if isinstance(event, events.Proved))
    assert proof.result.exact.worst < 1e-9  # type: ignore[union-attr]
    record = record_of(aligned.checkpoints[0])
    assert record is not None
    assert record.run["verified"]["equal"]


def test_python_and_the_command_line_align_alike(models: Path) -> None:
    done("align", "a", "--to", "b", "-o", "theirs")
    symfuse.align([symfuse.open(name, name=name) for name in "ab"], 1, prove=True).checkpoints[0].save("ours")
    one, other = (json.loads(Path(name, "symfuse.json").read_text("utf-8")) for name in ("theirs", "ours"))
    assert one.pop("seconds") > 0 < other.pop("seconds")
    one.pop("peak_memory")
    assert one == other


def test_notes_say_what_they_are_about(models: Path) -> None:
    config = json.loads(Path("b/config.json").read_text("utf-8"))
    Path("b/config.json").write_text(json.dumps(config | {"initializer_range": 0.5}), "utf-8")
    heard: list[events.Event] = []
    symfuse.merge(["a", "b"], follow=heard.append)
    [note] = [event for event in heard if isinstance(event, events.Note)]
    assert note == events.Note("a and b: config.json differs in initializer_range: 0.02 and 0.5; the base's is kept",
                               "harmless")  # fmt: skip
    heard.clear()
    with pytest.warns(SymfuseWarning, match="initializer_range"):
        symfuse.merge(["a", "b"], force_config=True, follow=heard.append)
    assert [event.about for event in heard if isinstance(event, events.Note)] == ["merge"]


@pytest.mark.parametrize(("call", "says"), [
    (lambda: symfuse.merge("a", "b"), "merge: sources is 'a'; expected a list, each of it a model"),
    (lambda: symfuse.merge(symfuse.open("a"), symfuse.open("b")), "sources is a Checkpoint; expected a list"),
    (lambda: symfuse.merge(["a", "b"], align="all"), r"align: these are keys of a recipe.*symfuse\.merge_recipe"),
    (lambda: symfuse.merge(["a", "b"], tokenizer="union"), r"tokenizer: these are keys.*symfuse\.merge_recipe"),
    (lambda: symfuse.merge(["a", "b"], dtype="bfloat61"), r"did you mean 'bfloat16'"),
])  # fmt: skip
def test_slips_of_merge_say_the_way_out(models: Path, call: Callable[[], object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        call()


def test_weights_and_dtypes_of_every_kind(models: Path) -> None:
    wanted = symfuse.merge(["a", "b"], weights=[0.25, 0.75], dtype=torch.float32)
    for weights in (torch.tensor([0.25, 0.75]), np.array([0.25, 0.75]), (np.float32(0.25), 0.75)):
        merged = symfuse.merge(["a", "b"], weights=weights, dtype="float32")
        assert all(torch.equal(merged[name], wanted[name]) for name in wanted)
        assert merged.info("cls.predictions.bias").dtype == torch.float32


def test_names_with_signs_of_recipes_are_names(models: Path) -> None:
    a, b = (symfuse.open(folder, name=name) for folder, name in (("a", "x@y"), ("b", "x+z")))
    merged = symfuse.merge([a, b], heads="x+z")
    record = record_of(merged)
    assert record is not None
    assert record.run["models"] == ["x@y", "x+z"]
    again = api.merge_recipe(json.loads(json.dumps(parse(record.run["recipe"]))), {"x@y": a, "x+z": b})
    assert all(torch.equal(again[name], merged[name]) for name in merged)


def parse(text: str) -> Any:
    return api.read_value(text, "the recipe")


def test_a_misspelt_vocabulary(models: Path) -> None:
    for keys in ({"tokenizer_source": "unoin"}, {"tokenizer": {"source": "unoin"}}):
        with pytest.raises(OptionError, match=r"one of union, base, shared-rows \(did you mean 'union'\?\)"):
            symfuse.merge_recipe(recipe("a", "b", **keys))
    refused = run("check", "a", "b", "--tokenizer", "bse")
    assert refused.exit_code == 2
    assert "did you mean 'base'?" in refused.stdout


def test_the_tokenizer_of_a_model_by_number(models: Path) -> None:
    numbered = parse_recipe(recipe("a", "b", tokenizer_source=2))
    assert numbered.tokenizer == parse_recipe(recipe("a", "b", tokenizer_source="b")).tokenizer
    with pytest.raises(OptionError, match="model 3: there are models 1 to 2"):
        parse_recipe(recipe("a", "b", tokenizer_source=3))
    refused = run("merge", "a", "b", "-o", "out", "--tokenizer", "3")
    assert "--tokenizer '3': write the number or the path of one model: 1 (a), 2 (b)" in refused.stderr
