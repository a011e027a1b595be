"""What tells a model or a loss from another of the same name, and that it is the same in another process."""

from __future__ import annotations

import enum
import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from symfuse.errors import OutputError
from symfuse.evaluation import Batch, Task, Totals, landscape
from symfuse.evaluation.identity import identity


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


class Net(nn.Module):
    """Of the same weights whatever else it has."""

    def __init__(self, act: Any = torch.relu, mask: float = 1.0) -> None:
        super().__init__()
        self.act = act
        self.register_buffer("mask", torch.tensor([mask]), persistent=False)


class Inner:
    def __init__(self, value: object) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Kind(enum.Enum):
    ONE, TWO = 1, 2


def loader(*numbers: int) -> DataLoader[Any]:
    data = TensorDataset(torch.tensor(numbers))
    return DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(0))


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
    "numpy's numbers": (np.float32(1), np.float32(2)),
    "numpy's integers": (weighted(np.int64(1)), weighted(np.int64(2))),
    "numpy's objects": (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    "ranges": (weighted(range(3)), weighted(range(4))),
    "paths": (weighted(Path("a")), weighted(Path("b"))),
    "slices": (weighted(slice(1, 2)), weighted(slice(1, 3))),
    "bytearrays": (bytearray(b"a"), bytearray(b"b")),
    "dtypes": (weighted(torch.float32), weighted(torch.float64)),
    "devices": (torch.device("cpu"), torch.device("meta")),
    "decimals": (Decimal("0.1"), Decimal("0.2")),
    "enums": (weighted(Kind.ONE), weighted(Kind.TWO)),
    "partials of these": (partial(default, weight=np.float32(1)), partial(default, weight=np.float32(2))),
    "loaders": (weighted(loader(1, 2, 3)), weighted(loader(1, 2, 4))),
    "functions of C": (weighted(torch.relu), weighted(torch.tanh)),
    "methods of C": (weighted(torch.Tensor.relu), weighted(torch.Tensor.tanh)),
    "ufuncs": (weighted(np.exp), weighted(np.log)),
    "attributes of modules": (weighted(Net(torch.relu)), weighted(Net(torch.tanh))),
    "buffers of modules": (weighted(Net(mask=1.0)), weighted(Net(mask=2.0))),
    "attributes of attributes": (Scaled(Inner(Inner(1))), Scaled(Inner(Inner(2)))),  # type: ignore[arg-type]
    "slots": (weighted(Slotted(1)), weighted(Slotted(2))),
    "random numbers": (weighted(random.Random(1)), weighted(random.Random(2))),
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


def test_objects_made_again_are_the_same_and_may_hold_themselves() -> None:
    assert identity(weighted(loader(1, 2))) == identity(weighted(loader(1, 2)))
    assert identity(weighted(Net())) == identity(weighted(Net()))
    one, other, third = Inner(1), Inner(1), Inner(2)
    for inner in (one, other, third):
        inner.value = [inner.value, inner]
    assert identity(one) == identity(other) != identity(third)
    shared = [1.5]
    assert identity([shared, shared]) == identity([[1.5], [1.5]])


def test_what_does_not_say_what_it_is_of_is_refused_only_for_a_journal(tmp_path: Path) -> None:
    for lost in (threading.Lock(), Inner([threading.Lock()]), sys.stderr):
        with pytest.raises(OutputError, match=r"cannot tell this loss from another: a .* leave journal out"):
            identity(weighted(lost))
    nested: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        nested = [nested]
    with pytest.raises(OutputError, match="nested too deeply"):
        identity(nested)

    lock = threading.Lock()

    def loss(module: nn.Module) -> float:
        with lock:
            return next(module.parameters()).square().sum().item()

    models = {str(seed): linear(seed) for seed in range(3)}
    with pytest.raises(OutputError, match=r"a _thread\.lock in it"):
        landscape(models, loss, steps=2, journal=tmp_path / "journal.jsonl")
    assert not list(tmp_path.iterdir())
    assert landscape(models, loss, steps=2).names == ("0", "1", "2")


def test_weights_are_in_memory_one_at_a_time() -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = []

    class Lazy(Mapping[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            gc.collect(0)
            most.append(len(alive))
            tensor = torch.zeros(3)
            alive.add(tensor)
            return tensor

        def __iter__(self) -> Iterator[str]:
            return iter("abcdef")

        def __len__(self) -> int:
            return 6

    identity(Lazy())
    assert len(most) == 6
    assert max(most) <= 1


def test_it_is_the_same_in_every_process() -> None:
    program = """
from pathlib import Path
import torch
from torch import nn
from symfuse.evaluation.identity import identity
def loss(module, names=frozenset(["b", "a", "c"])):
    return {"x", "y", "z"} | names
class Own:
    kinds = object()
    inner = None
    def __init__(self): self.kind = object()
    def __call__(self, module): return module in {"p", "q", "r"}
own = Own()
own.inner = [Own(), {"b": torch.relu, "a": {torch.float32, "x"}}, nn.TransformerEncoderLayer(2, 1, 2), Path("a"), own]
for part in own.inner[2].parameters(): nn.init.ones_(part)
print(identity(loss), identity(own))
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"  # in which the words of these sets come in other orders
    }
    assert len(said) == 1
