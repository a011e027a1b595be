"""Fisher and RegMean merges, and AdaMerging's objective, against those of fusion_bench (MIT; Tang et al. 2024).

Its functions are taken out of its wheel, as the package imports far more than they need.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symfuse
from evaluation.task_cases import task
from methods.guided_cases import pair
from symfuse.demo.packages import FUSION_BENCH, available, fetch
from symfuse.evaluation.tasks.base import Predicting
from symfuse.io import Checkpoint
from symfuse.methods.adamerging import entropies

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(available(FUSION_BENCH) is not None, reason=f"{FUSION_BENCH} cannot be had"),
]


@cache
def theirs(path: str, *names: str) -> dict[str, Callable[..., Any]]:
    """Functions of a file of the package."""
    tree = ast.parse((fetch(FUSION_BENCH) / "fusion_bench" / "method" / path).read_text("utf-8"))
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert [node.name for node in kept] == list(names)
    given: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "nn": nn, "Dict": dict, "List": list}
    exec(compile(ast.Module(kept, []), path, "exec"), given)
    return {name: given[name] for name in names}


def wide(label: str = "sequence") -> tuple[Checkpoint, Checkpoint]:
    a, b = pair(label)
    return a.to(torch.float64), b.to(torch.float64)


def test_fisher() -> None:
    a, b = wide()
    data = [task("sequence", batch_size=4, limit=9, seed=1), task("sequence", batch_size=3, limit=11, seed=2)]
    found = [symfuse.collect(c, t, "fisher") for c, t in zip((a, b), data, strict=True)]
    names = {file: file.removeprefix("bert.") for file in a if file.removeprefix("bert.") in found[0].tensors}
    assert len(names) > 30
    merge = theirs("fisher_merging/fisher_merging.py", "get_models_fisher_norm", "merging_with_fisher_weights")
    for normalized, scale in ((False, "none"), (True, "norm")):
        expected = merge["merging_with_fisher_weights"](
            {file: [c[file] for c in (a, b)] for file in names},
            [{file: f.tensors[name].double() for file, name in names.items()} for f in found],
            torch.tensor([0.3, 0.7], dtype=torch.float64),
            normalized,
            1e-30,  # which is added, where ours is a floor
        )
        merged = symfuse.merge(
            [a, b], method="fisher", statistics=found, weights=[0.3, 0.7], parameters={"floor": 0.0, "scale": scale}
        )
        for file, name in names.items():
            # Where no Fisher is above their number there is nothing but it; ours is the weighted mean then, as theirs.
            seen = sum(f.tensors[name] for f in found) > 1e-20
            torch.testing.assert_close(merged[file][seen], expected[file][seen], rtol=1e-5, atol=1e-8)


def test_regmean() -> None:
    a, b = wide()
    data = [task("sequence", batch_size=4, limit=9, seed=1), task("sequence", batch_size=3, limit=11, seed=2)]
    found = [symfuse.collect(c, t, "gram") for c, t in zip((a, b), data, strict=True)]
    merged = symfuse.merge([a, b], method="regmean", statistics=found, parameters={"alpha": 0.8, "ridge": 0.0})
    files = [file for file in merged if found[0].of(file.removeprefix("bert."))]
    assert len(files) == 14
    grams = []
    for statistics in found:
        known = {file: statistics.of(file.removeprefix("bert.")) for file in files}
        means = {f: k.read("gram").double() / k.values["positions"] for f, k in known.items() if k is not None}
        grams.append({file.removesuffix(".weight"): gram for file, gram in means.items()})
    merge = theirs("regmean/regmean.py", "reduce_non_diagonal_elements", "merging_with_regmean_weights")
    tensors = {file: [c[file] for c in (a, b)] for file in merged if merged[file].is_floating_point()}
    expected = merge["merging_with_regmean_weights"](tensors, grams, 0.8)
    for file in expected:
        torch.testing.assert_close(merged[file], expected[file], rtol=1e-6, atol=1e-8)
    plain = symfuse.merge([a, b])
    assert all((merged[file] - plain[file]).abs().max() > 1e-4 for file in files)


@pytest.mark.parametrize("label", ["sequence", "image"])
def test_the_objective_of_adamerging(label: str) -> None:
    a, _ = pair(label)
    data = task(label, batch_size=4)
    assert isinstance(data, Predicting)
    module = symfuse.to_module(a)
    entropy = theirs("adamerging/entropy_loss.py", "entropy_loss")["entropy_loss"]
    for batch in itertools.islice(data.batches, 3):
        logits, _ = data.predicted(module, batch)
        found = entropies(data, module, batch)
        torch.testing.assert_close(found.mean(), entropy(logits), rtol=1e-5, atol=1e-6)
