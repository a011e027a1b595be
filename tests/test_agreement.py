"""The same recipes through mergekit itself: what docs/agreement.md shows, in float32, where both must agree."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("mergekit", reason="mergekit is not installed; it comes with the extra `test`")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
METHODS = (
    "linear", "linear, not normalized", "slerp", "nuslerp", "nuslerp, base", "nuslerp, by row", "nuslerp, by column",
    "multislerp", "multislerp, base", "karcher", "task_arithmetic", "task_arithmetic, normalized", "ties",
    "ties, rescaled", "ties, not normalized", "breadcrumbs", "breadcrumbs_ties", "model_stock",
    "model_stock, filter-wise", "sce", "sce, all", "nearswap", "arcee_fusion", "ram", "ramplus_tl",
    "passthrough, slices",
)  # fmt: skip
ON_THE_LIMIT = {"arcee_fusion": 4}  # entries that mergekit's rounding puts on the other side of its threshold


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import agreement  # type: ignore[import-not-found]

        yield agreement
        sys.modules.pop("agreement")


@pytest.fixture(scope="module")
def models(benchmark: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    with benchmark.quiet():
        benchmark.make_models(folder, torch.float32)
    return folder


def test_all_recipes_are_tested(benchmark: ModuleType) -> None:
    assert set(METHODS) == set(benchmark.METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_both_write_the_same(name: str, benchmark: ModuleType, models: Path) -> None:
    found = benchmark.agreement(benchmark.text_of(benchmark.METHODS[name]), models)
    assert not isinstance(found, str), found
    assert found.keys
    assert found.config == ()
    assert found.apart <= ON_THE_LIMIT.get(name, 0), found
    assert found.equal > 0.2


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_random_methods_keep_as_much(name: str, benchmark: ModuleType, models: Path) -> None:
    found = benchmark.kept(name, 0.6, models)
    ours, theirs = found["symfuse"], found["mergekit"]
    assert abs(ours.rate - theirs.rate) < 0.02
    assert abs(ours.expectation - 1) < 0.03


def test_a_difference_is_seen(benchmark: ModuleType, models: Path, tmp_path: Path) -> None:
    a, b = (benchmark.compare(models / "base", models / name) for name in ("base", "a"))
    assert (a.difference, a.equal, a.apart) == (0, 1, 0)
    assert b.apart > 1000
    assert b.difference > 0.01


@pytest.mark.parametrize("file", ["several_named.yml", "tokenizer_source.yml", "tokenizer_tokens.yml"])
def test_recipes_of_the_documentation(file: str, benchmark: ModuleType, models: Path) -> None:
    found = benchmark.agreement((benchmark.RECIPES / file).read_text(), models)
    assert not isinstance(found, str), found
    assert found.keys
    assert found.config == ()
    assert found.apart == 0, found
