"""On a real GPU, what `docs/gpu.md` promises: the same results as on the processor within its tolerance. That the tests
themselves run is tried on the pretended one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.tiny import MODELS
from device.pretend import pretended
from matching.learned import learning_cases
from methods.test_devices import ELEMENTWISE, merged
from methods.tuned import classifier, data, near
from symfuse import api
from symfuse.alignment import Alignment
from symfuse.groups import GROUPS, Element, Moments, PartMoments, objective
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.matching.learned import Learning
from symfuse.methods import METHODS
from symfuse.model import Model
from symfuse.stats import weight_moments

REAL = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

OBJECTIVE, ELEMENTS, LOSS = 1e-9, 1e-6, 1e-4  # relative, absolute, relative


@pytest.fixture(
    params=[pytest.param("real", marks=REAL), pytest.param("pretended", marks=pytest.mark.slow)], autouse=True
)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device that the tests call cuda."""
    with pretended() if request.param == "pretended" else nullcontext():
        yield


@cache
def pair(label: str) -> tuple[Checkpoint, Checkpoint]:
    return MODELS[label](0).replace(name="a"), MODELS[label](1).replace(name="b")


def close(plain: Alignment, there: Alignment) -> None:
    """The same elements to ELEMENTS, all of them on the processor."""
    assert plain.elements.keys() == there.elements.keys()
    for instance, element in plain.elements.items():
        for key, tensor in element.tensors().items():
            found = there.elements[instance].tensors()[key]
            assert found.device.type == "cpu"
            torch.testing.assert_close(found, tensor, rtol=ELEMENTS, atol=ELEMENTS)
    torch.testing.assert_close(dict(there.shifts), dict(plain.shifts), rtol=ELEMENTS, atol=ELEMENTS)


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_solvers_find_as_much(group: str) -> None:
    solver, rng = GROUPS[group], torch.Generator().manual_seed(0)
    n = solver.size or 24
    x, y = (torch.randn(6, n, 3 * n, generator=rng, dtype=torch.float64) for _ in range(2))
    x = solver.random(n, (6,), rng).act(y, 1) + 0.3 * x
    own = (x @ x.mT, y @ y.mT) if solver.gram else (x.square().sum(-1), y.square().sum(-1))
    moments: PartMoments = {"primal": Moments(x @ y.mT, *own)}
    there: PartMoments = {"primal": moments["primal"].to("cuda")}
    best, other = solver.best(moments), solver.best(there)
    assert other.device.type == "cuda"
    values = objective(best, moments), objective(other, there).cpu()
    torch.testing.assert_close(values[1], values[0], rtol=OBJECTIVE, atol=0)


@pytest.mark.parametrize("label", ["bert-mlm", "llama-lm", "gpt2-lm", "mixtral-lm"])
def test_models_are_matched_alike(label: str) -> None:
    a, b = pair(label)
    plain, there = (api.match(a, b, axes="attention,ffn", device=device) for device in ("cpu", "cuda"))
    close(plain, there)
    for before, after in zip(plain.provenance["steps"], there.provenance["steps"], strict=True):
        assert after["after"] == pytest.approx(before["after"], rel=OBJECTIVE)


def test_activations_are_heard_alike() -> None:
    a, b = pair("bert-mlm")
    rng = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(61, (8, 9), generator=rng), "attention_mask": torch.ones(8, 9).long()}]
    close(*(api.match(a, b, axes="all", data=batches, device=device) for device in ("cpu", "cuda")))


def test_moments_are_the_same() -> None:
    a, b = (Model.of(one) for one in pair("bert-mlm"))
    for instance in a.spec.movable:
        group = a.spec.axes[instance.axis].group
        assert group is not None
        plain, there = (
            weight_moments(a.spec, instance, b.on(device).scanned, a.on(device).scanned, group)
            for device in ("cpu", "cuda")
        )
        for part, m in plain.items():
            torch.testing.assert_close(there[part].xy.cpu(), m.xy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merges_are_one_unit_apart_at_most(name: str, dtype: torch.dtype) -> None:
    """Of bfloat16, in which they are written; those that treat entries one by one are the same."""
    plain, there = (merged(name, device, dtype) for device in ("cpu", "cuda"))
    if name in ELEMENTWISE:
        assert torch.equal(plain.bfloat16(), there.bfloat16())
    torch.testing.assert_close(there.bfloat16(), plain.bfloat16(), rtol=2**-7, atol=1e-6)


def test_moved_models_are_written_from_there(tmp_path: Path) -> None:
    a, b = pair("bert-mlm")
    alignment = api.match(a, b, axes="attention,ffn")
    found: list[dict[str, Tensor]] = []
    for device in ("cpu", "cuda"):
        merge = api.merge([alignment(a.on(device)), b], device=device)
        assert all(merge[name].device.type == "cpu" for name in merge)
        merge.save(tmp_path / device)
        found.append(dict(open_checkpoint(tmp_path / device)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["fisher", "gram"])
def test_statistics_are_collected_alike(kind: str) -> None:
    base = classifier()
    plain, there = (api.collect(near(base, 0), data(base), kind, device=device).tensors for device in ("cpu", "cuda"))
    for name in plain:
        size = plain[name].abs().max().item()
        torch.testing.assert_close(there[name], plain[name], rtol=1e-3, atol=1e-4 * size)


def test_losses_are_the_same() -> None:
    base = classifier()
    task, models = data(base), [near(base, seed) for seed in range(2)]
    for device in (None, "cuda"):
        assert api.evaluate(models[0], task, device=device).loss == pytest.approx(
            api.evaluate(models[0], task).loss, rel=LOSS
        )
    one, other = (api.barrier(*models, task, points=3, refine=0, device=device) for device in (None, "cuda"))
    assert other.curves["none"].barrier == pytest.approx(one.curves["none"].barrier, abs=LOSS)


def test_what_is_learned_there_is_as_good() -> None:
    source, anchor, task = learning_cases.model("bert", 1), learning_cases.model("bert"), learning_cases.task("bert")

    def barriers(device: str) -> list[float]:
        own = Learning(task, steps=4, every=2, points=3, device=device)
        found: Any = api.match(source, anchor, axes="attention", learn=own, device=device).provenance["learning"]
        return [one["barrier"] for one in found["history"]]

    assert barriers("cuda") == pytest.approx(barriers("cpu"), rel=1e-2, abs=1e-3)


def test_elements_go_there_and_back() -> None:
    rng = torch.Generator().manual_seed(0)
    elements: list[Element] = [group.random(group.size or 5, (3,), rng) for group in GROUPS.values()]
    for element in elements:
        there = element.to("cuda")
        assert there.device.type == "cuda"
        torch.testing.assert_close(there.to_dense().cpu(), element.to_dense())
        torch.testing.assert_close(there.to("cpu").tensors(), element.tensors(), rtol=0, atol=0)
