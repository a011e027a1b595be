"""RegMean as a whole: Gram matrices reach the merge, from data, from files and through an alignment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import symfuse
from command import done
from evaluation.task_cases import task
from methods.guided_cases import pair, write
from symfuse.alignment import random_alignment
from symfuse.errors import IncompatibleError, OptionError, SymmetryError
from symfuse.matching.problem import ROTATABLE
from symfuse.methods.regmean import gram_of, regmean
from symfuse.model import Model
from symfuse.transporting.statistics import transported_statistics

NAME = "bert.encoder.layer.1.output.dense.weight"


def test_the_merge_is_the_formula_and_no_average() -> None:
    a, b = pair()
    data = [task("sequence", batch_size=4, limit=9, seed=1), task("sequence", batch_size=3, limit=11, seed=2)]
    merged = symfuse.merge([a, b], method="regmean", data=data, weights=[1.0, 2.0], parameters={"alpha": 0.8})
    grams = [gram_of(Model.of(c), t) for c, t in zip((a, b), data, strict=True)]
    plain = symfuse.merge([a, b], weights=[1.0, 2.0])
    solved = 0
    for file in merged:
        known = [g.of(file.removeprefix("bert.")) for g in grams]
        if None in known:
            torch.testing.assert_close(merged[file], plain[file], rtol=1e-6, atol=1e-7)
            continue
        means = [one.read("gram") / one.values["positions"] for one in known if one is not None]
        expected = regmean([a[file], b[file]], means, dim=1, shares=[1.0, 2.0], alpha=0.8)
        torch.testing.assert_close(merged[file].double(), expected, rtol=1e-5, atol=1e-6)
        assert (merged[file] - plain[file]).abs().max() > 1e-4, f"the Gram matrix of {file} does not reach the merge"
        solved += 1
    assert solved == 14  # six maps in each of two layers, pooler, classifier


def test_aligned_models_take_transported_statistics() -> None:
    a, b = pair()
    data = task("sequence", batch_size=4)
    alignment = random_alignment(symfuse.declare(a), 2, axes=("qk", "v", "h", "ffn"))
    before = [symfuse.collect(c, data, "gram") for c in (a, b)]
    moved = alignment(a)
    anew = symfuse.merge([moved, b], method="regmean", data=data)
    after = transported_statistics(before[0], alignment)
    carried = symfuse.merge([moved, b], method="regmean", statistics=[after, before[1]])
    for name in anew:
        torch.testing.assert_close(carried[name], anew[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(IncompatibleError, match="taken from another model"):
        symfuse.merge([moved, b], method="regmean", statistics=before)
    stale = [replace(one, provenance={}) for one in before]  # whose they are is not known
    wrong = symfuse.merge([moved, b], method="regmean", statistics=stale)
    assert (wrong[NAME] - anew[NAME]).abs().max() > 1e-2


def test_recipes_and_options_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    data = [symfuse.task(None, f"{name}.csv", name) for name in "ab"]
    expected = symfuse.merge(["a", "b"], method="regmean", data=data)
    done("merge", "a", "b", "-o", "out", "--method", "regmean", "--data", "a.csv", "--data", "b.csv")
    for name in "ab":
        done("collect", name, "--kind", "gram", "--data", f"{name}.csv", "--memory", "100KB", "-o", f"{name}-g")
    done("merge", "a", "b", "-o", "again", "--method", "regmean", "--statistics", "a-g", "--statistics", "b-g")
    for folder in ("out", "again"):
        found = symfuse.open(folder)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)
    (tmp_path / "t.csv").write_text("text\nabc def\nghi\n", "utf-8")  # RegMean looks at no labels
    done("merge", "a", "b", "-o", "unlabelled", "--method", "regmean", "--data", "t.csv")


def test_statistics_of_another_kind_and_frame_are_refused() -> None:
    a, b = pair()
    data = task("sequence", batch_size=4)
    fisher, gram = symfuse.collect(a, data, "fisher"), symfuse.collect(a, data, "gram")
    with pytest.raises(OptionError, match="needs gram statistics, and these are fisher"):
        symfuse.merge([a, b], method="regmean", statistics=[fisher, None])
    gpt, other = pair("causal")
    rotated = symfuse.match(other, to=gpt, axes=("residual",), frame=ROTATABLE)
    with pytest.raises(SymmetryError, match="rewrites the model first"):
        transported_statistics(symfuse.collect(other, task("causal"), "gram"), rotated)
    assert not gram.notes()


def test_too_little_data_are_said() -> None:
    a, _ = pair()
    few = symfuse.collect(a, task("sequence", batch_size=4, limit=2), "gram")
    assert "too few data for a Gram matrix of full rank" in few.notes()[0]
    merged = symfuse.merge([a, a.replace(name="b")], method="regmean", data=task("sequence", limit=1))
    assert all(torch.isfinite(merged[name]).all() for name in merged)  # case C79: one text, singular everywhere
