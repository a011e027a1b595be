"""What tells a model or a loss from another of the same name, and that it is the same in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from symfuse.evaluate import Batch, Task, Totals
from symfuse.evaluate.identity import identity


def weighted(weight: object) -> Callable[[nn.Module], object]:
    def loss(module: nn.Module) -> object:
        return weight if weight is not loss else module

    return loss


def default(module: nn.Module, weight: float = 1.0) -> float:
    return weight


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: nn.Module) -> float:
        return self.scale * len(list(module.parameters()))

    def halved(self, module: nn.Module) -> float:
        return self.scale / 2 * len(list(module.parameters()))


class First(Task):
    name, auto = "own", "AutoModel"

    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        return Totals(module(batch["x"]), 1)


class Second(Task):
    name, auto = "own", "AutoModel"

    @torch.no_grad()
    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        return Totals(module(batch["x"]), 2)


class Third(Task):
    name, auto = "own", "AutoModel"

    @torch.no_grad()
    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        return Totals(module(batch["x"]), 3)


for _one in (First, Second, Third):
    _one.__qualname__ = "Own"
BATCHES = [{"x": torch.arange(3)}]


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(2, 2)


OTHERS: dict[str, tuple[Any, Any]] = {
    "constants": (lambda _: 1.0, lambda _: 2.0),
    "code": (lambda m: 1.0 + m.x, lambda m: 1.0 - m.x),
    "names": (lambda m: m.weight, lambda m: m.bias),
    "inner code": (lambda m: [x + 1 for x in m], lambda m: [x + 2 for x in m]),
    "closed over": (weighted(1.0), weighted(2.0)),
    "tensors closed over": (weighted([{"x": torch.tensor([1, 2])}]), weighted([{"x": torch.tensor([1, 3])}])),
    "shapes closed over": (weighted(torch.zeros(2, 3)), weighted(torch.zeros(3, 2))),
    "arrays closed over": (weighted(np.array([1, 2])), weighted(np.array([1, 3]))),
    "losses closed over": (weighted(weighted(1)), weighted(weighted(2))),
    "modules closed over": (weighted(linear(0)), weighted(linear(1))),
    "lists": (weighted([[1], 2]), weighted([[1, 2]])),
    "bound": (partial(default, weight=1.0), partial(default, weight=2.0)),
    "attributes": (Scaled(1.0), Scaled(2.0)),
    "attributes of the bound": (Scaled(1.0).halved, Scaled(2.0).halved),
    "methods": (Scaled(1.0).halved, Scaled(1.0).__call__),
    "data of tasks": (First(BATCHES), First([{"x": torch.arange(4)}])),
    "code of tasks": (First(BATCHES), Second(BATCHES)),
    "code of tasks under a decorator": (Second(BATCHES), Third(BATCHES)),
    "state": (linear(0).state_dict(), linear(1).state_dict()),
    "dtype": ({"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.int32)}),
    "half precision": ({"w": torch.ones(2, dtype=torch.bfloat16)}, {"w": torch.zeros(2, dtype=torch.bfloat16)}),
    "names of weights": ({"w": torch.zeros(2)}, {"v": torch.zeros(2)}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_others_are_told_apart(what: str) -> None:
    one, other = OTHERS[what]
    assert identity(one) == identity(one)
    assert identity(one) != identity(other)


def test_the_same_made_again_is_the_same() -> None:
    scale = torch.tensor([[2.0, 3.0]])
    assert identity(weighted((1.5, "a", None, {"b", "c"}, scale))) == identity(
        weighted((1.5, "a", None, {"c", "b"}, scale.T.contiguous().T))
    )
    assert identity(Scaled(1.0)) == identity(Scaled(1.0))
    assert identity({"a": scale, "b": torch.zeros(0)}) == identity({"b": torch.zeros(0), "a": nn.Parameter(scale).data})
    assert identity(weighted(math := sys)) == identity(weighted(math))  # a module, by its name


def test_a_function_that_calls_itself_ends() -> None:
    def again(module: nn.Module) -> Tensor | float:
        return 0.0 if module.training else again(module)

    assert identity(again) == identity(again)


def test_it_is_the_same_in_every_process() -> None:
    program = """
from symfuse.evaluate.identity import identity
def loss(module, names=frozenset(["b", "a", "c"])):
    return {"x", "y", "z"} | names
class Own:
    kinds = object()
    def __init__(self): self.kind = object()
    def __call__(self, module): return module in {"p", "q", "r"}
print(identity(loss), identity(Own()))
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "123"
    }
    assert len(said) == 1
