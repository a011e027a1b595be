"""The benchmarks can be started: they are imported, and the models that they make are models."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from symfuse import api
from symfuse.architectures import resolve

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> object:
    """Imports one as if it were run from its folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def benchmark(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return benchmark


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_it_is_imported(load, path: Path) -> None:  # type: ignore[no-untyped-def]
    module = load(path.stem)
    assert module.__doc__
    assert path.stem.startswith("_") or callable(module.main)


@pytest.mark.parametrize("shape", range(2))
@pytest.mark.parametrize("kind", ["independent", "fine-tune", "unbalanced"])
def test_its_pairs_are_models_of_their_family(load, shape: int, kind: str) -> None:  # type: ignore[no-untyped-def]
    matching = load("matching")
    assert kind in matching.KINDS
    assert len(matching.SHAPES) == 2
    whole = matching.SHAPES[shape]
    small = replace(whole, config={**whole.config, "num_hidden_layers": 1, "hidden_size": 128,
                                   "num_attention_heads": 2, "intermediate_size": 40})  # fmt: skip
    source, anchor = matching.pair(small, kind)
    assert source.spec.family == anchor.spec.family == whole.config["model_type"]
    assert {i.axis for i in source.spec.movable} >= {"qk", "v", "ffn"}
    assert any(not torch.equal(source.read(name), anchor.read(name)) for name in source.spec.tensors)
    tasks = matching.attention_tasks(source, anchor, small, 1) | matching.apply_tasks(source, 1)
    assert len(tasks) > 5
    for task in tasks.values():
        task()


def test_scores_of_the_assignment_benchmark(load) -> None:  # type: ignore[no-untyped-def]
    assignment = load("assignment")
    for kind in ("independent", "correlated", "fine-tune"):
        x, y = assignment.features(kind, 64)
        assert x.shape == y.shape
        assert len(x) == 64


def test_a_declaration_without_names_is_that_of_the_config(load) -> None:  # type: ignore[no-untyped-def]
    for shape in load("matching").SHAPES:
        assert resolve(shape.config, []).axes["l"].size == shape.layers


@pytest.mark.parametrize("number", range(2))
def test_sweeps_against_their_floor(load, number: int) -> None:  # type: ignore[no-untyped-def]
    """A post-norm model with a pooler, and a pre-norm one, whose residual stream is rotated."""
    sweeps = load("sweeps")
    shape = sweeps.shapes(layers=2, width=128, vocabulary=40)[number]
    for kind in ("independent", "fine-tune"):
        source, anchor = sweeps.pair(shape, kind)
        ready = sweeps.Ready.of(source, anchor)
        matched = {instance.axis: group.name for instance, group in ready.chosen.groups.items()}
        assert matched.keys() == {"residual", "h", "qk", "v", "ffn"} | ({"pool"} if number == 0 else set())
        assert matched["residual"] == ("permutation", "centred")[number]
        for task in (sweeps.floor(ready, 2), sweeps.sweep(ready, 2)):
            task()
    rows = list(sweeps.measure(shape, [1], 2))
    assert all(row["ratio"] > 0 and row["whole"]["descents"]["identity"] for row in rows)
    assert sweeps.table(rows).count("\n") == 3


def test_what_the_scale_benchmark_plants_is_found(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    scale = load("scale")
    shape = scale.Shape(256, 1, vocab=50, head=32)
    models, planted = scale.make(tmp_path, shape, "planted")
    found = scale.recovered(api.match(models["source"], models["anchor"], axes="attention,ffn"), planted)
    assert found["neurons"] == 1
    assert 1e-6 < max(found["turns"], found["factors"]) < 0.1
    other = api.match(models["anchor"], models["anchor"], axes="attention,ffn")
    with pytest.raises(KeyError):  # nothing is moved
        scale.recovered(other, planted)
    models, planted = scale.make(tmp_path, shape, "independent")
    assert planted is None
    assert api.distance(models["source"], models["anchor"]).cosine < 0.9


def test_the_scale_benchmark_fits_laws(load) -> None:  # type: ignore[no-untyped-def]
    scale = load("scale")
    rows = [
        {"kind": "planted", "width": w, "layers": n, "cpu": 5 + n * w**2.5, "wall": 1 + n * w, "peak": 1e9 * w}
        for w in (2, 4, 8) for n in (1, 2, 4)
    ]  # fmt: skip
    text = "\n".join(scale.growth(rows))
    assert "width^2.50, over the two largest as width^2.50" in text
    assert "as depth^1.00, peak as depth^0.00" in text
    assert "32 layers of width 8" in text
    assert scale.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 4])
def test_steps_of_learning_against_steps_of_training(load, number: int, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Of one kind each; pre-norm models in the frame in which they are rotated."""
    learning = load("learning")
    shape = learning.SHAPES[number]
    layers = "n_layer" if shape.kind == "gpt2" else "num_hidden_layers"
    small = {"vocab_size": 40} if shape.kind == "bert" else {}
    shape = replace(shape, config={**shape.config, layers: 1, **small}, batch=2, length=min(shape.length, 8))
    pair = learning.pair(shape)
    residual = pair[0].spec.axes["residual"].group
    assert residual.name == ("permutation" if shape.kind == "bert" else "centred")
    found = learning.tasks(shape, tmp_path)
    assert list(found) == ["training", "kept", "straight-through", "dual"]
    assert learning.row(shape, found, 2).startswith(f"| {shape.name} | ")
    if number == 0:
        assert "aten::" in learning.profile(found["kept"])
