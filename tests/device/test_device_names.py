"""The names of devices: what is here, and what is said of what is not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from command import run
from contract.tiny import MODELS
from device.pretend import pretended
from symfuse import api
from symfuse.device import require
from symfuse.errors import OptionError
from symfuse.evaluation import evaluate
from symfuse.merging import Merged, Stream
from symfuse.model import Model


def test_the_processor_is_always_here() -> None:
    assert require("cpu") == "cpu"


UNKNOWN = ["foo", "", "cuda:", "cuda:x", "cuda:-1", "cuda1", "CUDA", "meta", "cpu:0", "xpu", "cuda:0:1"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names(name: str) -> None:
    expected = f"device {name!r} cannot be used (expected cpu, cuda, or cuda:1 for the second GPU)"
    with pytest.raises(OptionError, match=f"^{re.escape(expected)}$"):
        require(name)


@pytest.mark.parametrize("name", ["mps", "mps:0"])
def test_what_cannot_compute_in_float64(name: str) -> None:
    with pytest.raises(OptionError, match=f"device '{name}' cannot be used .moments and factorisations are in float64"):
        require(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
@pytest.mark.parametrize(("build", "why"), [(None, "is built without CUDA"), ("12.8", "no GPU, or no driver for it")])
def test_no_gpu(name: str, build: str | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(OptionError, match=f"device '{name}' cannot be used .*{why}.; leave it out, to compute on the"):
        require(name)


def test_of_several_the_current_one_or_that_of_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended():
        assert require("cuda") == "cuda:0"
        with pytest.raises(OptionError, match=r"device 'cuda:1' cannot be used \(there is cuda:0\); leave it out"):
            require("cuda:1")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        assert [require(name) for name in ("cuda", "cuda:2")] == ["cuda:1", "cuda:2"]
        with pytest.raises(OptionError, match=r"\(there are cuda:0, cuda:1, cuda:2\)"):
            require("cuda:3")


def test_everything_that_takes_a_device_asks_first() -> None:
    a, b = (MODELS["bert-mlm"](seed) for seed in range(2))
    never: Any = object()
    calls = (
        lambda: api.match(a, b, device="foo"), lambda: api.align([a, b], device="foo"),
        lambda: api.align([a, b], "universe", device="foo"), lambda: api.merge([a, b], device="foo"),
        lambda: api.match(a, b, data=[{}], device="foo"), lambda: evaluate(a, lambda _: never, device="foo"),
        lambda: a.on("foo"), lambda: Model.of(a).on("foo"), lambda: Merged({}, device="foo"),
        lambda: Stream("w", (2,), [], device="foo"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(OptionError, match="device 'foo' cannot be used"):
            call()


VERBS = [
    "align a --to b -o c", "merge a b -o c", "distance a b", "evaluate a --data d", "barrier a b --data d",
    "landscape a b --data d", "collect a --data d -o c",
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_asks_before_anything_else(verb: str) -> None:
    result = run(*verb.split(), "--device", "foo")
    assert result.exit_code == 2
    assert "device 'foo' cannot be used" in result.output
    assert "Compute on cpu, cuda" in run(verb.split()[0], "--help").output
