"""Tensors that are read or computed when they are asked for: what passes through, what is computed, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from symfuse.errors import IncompatibleError, OutputError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io import open as open_checkpoint
from symfuse.io.lazy import Held, Latest, Lazy, Rewritten, Rule

BFLOAT16 = TensorInfo(torch.bfloat16, (2, 3))


def stored(folder: Path) -> Checkpoint:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(2, 3, generator=generator) for name in "ab"}
    return open_checkpoint(Checkpoint(tensors, {}, name="m").save(folder / "m"))


def test_names_pass_through_with_all_that_their_source_can_do(tmp_path: Path) -> None:
    source = stored(tmp_path)
    renamed = Rewritten(source, {"x": "b", "y": "a"})
    assert list(renamed) == ["x", "y"]
    assert renamed.info("x") == source.info("b")
    assert renamed.file_of("x") == source.file_of("b") == "model.safetensors"
    assert torch.equal(renamed["x"], source["b"])
    assert torch.equal(renamed.part("y", 1, 4), source["a"].flatten()[1:4])
    assert torch.equal(torch.cat([block.flatten() for block in renamed.saved("x")]), source["b"].flatten())
    assert "a" not in renamed


def test_a_rule_is_rounded_once_and_is_in_no_file(tmp_path: Path) -> None:
    source = stored(tmp_path)
    rules: dict[str, str | Rule] = {"a": Rule(BFLOAT16, lambda: source["a"].double() / 3), "b": "b"}
    model = source.replace(tensors=Rewritten(source, rules))
    assert model["a"].dtype == torch.bfloat16
    assert torch.equal(model["a"], (source["a"].double() / 3).bfloat16())
    assert model.read("a").dtype == torch.float64
    assert (model.file_of("a"), model.file_of("b")) == (None, "model.safetensors")
    assert torch.equal(open_checkpoint(model.save(tmp_path / "out"))["a"], model["a"])


def test_a_shorter_way_to_the_value_is_what_is_read_and_saved() -> None:
    rule = Rule(BFLOAT16, lambda: torch.zeros(2, 3, dtype=torch.float64), value=lambda: torch.ones(2, 3))
    tensors = Rewritten(None, {"a": rule})
    assert torch.equal(tensors["a"], torch.ones(2, 3, dtype=torch.bfloat16))
    assert torch.equal(next(tensors.saved("a")), tensors["a"])
    assert not tensors.wide("a").any()


def test_values_that_do_not_fit_are_named() -> None:
    large = Rule(TensorInfo(torch.float16, (1,)), lambda: torch.full((1,), 1e6), what="the aligned tensor")
    with pytest.raises(IncompatibleError, match=r"^a: the aligned tensor does not fit in float16, the dtype of m; "):
        Rewritten(None, {"a": large}, "m")["a"]


def test_parts_of_a_computed_tensor_are_of_one_computation() -> None:
    calls: list[str] = []

    class Counted(Lazy):
        def wide(self, name: str) -> Tensor:
            calls.append(name)
            return torch.arange(6.0).reshape(2, 3)

    tensors = Counted({"a": TensorInfo(torch.float32, (2, 3)), "b": TensorInfo(torch.float32, (2, 3))})
    parts = [tensors.part("a", 2 * i, 2 * i + 2) for i in range(3)]
    assert torch.equal(torch.cat(parts), torch.arange(6.0))
    tensors.part("b", 0, 1)
    assert calls == ["a", "b"]


def test_a_tensor_that_is_not_as_announced_is_not_saved() -> None:
    wrong = Held({"a": torch.ones(2)}, {"a": TensorInfo(torch.float32, (3,))})
    blocks: Iterator[Tensor] = wrong.saved("a")
    with pytest.raises(OutputError, match=r"announced as float32\[3\] and came as float32\[2\]"):
        next(blocks)


def test_the_latest_result_is_kept_and_no_other() -> None:
    made: list[int] = []
    latest = Latest[int, int]()
    for key in (1, 1, 2, 1):
        assert latest.get(key, lambda key=key: made.append(key) or 10 * key) == 10 * key  # type: ignore[misc, func-returns-value]
    assert made == [1, 2, 1]
