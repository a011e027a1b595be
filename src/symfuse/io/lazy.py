"""Tensors by name that are read, or computed, on demand."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from symfuse.errors import IncompatibleError, OutputError
from symfuse.io.tensors import BLOCK, TensorInfo, flat_part, is_finite, scan

K = TypeVar("K")
V = TypeVar("V")


class Lazy(Mapping[str, Tensor]):
    """Tensors by name whose dtypes and shapes (`infos`) are known before any tensor is read or computed.

    A subclass implements `wide`, and overrides methods that it can do better. name: of the model, for messages.
    computed: whether values may have more digits than their dtype; such models are identified by name until they are
    saved. at_hand: whether tensors are in a file or in memory, so that reading one again computes nothing.
    """

    name = ""
    computed = True
    at_hand = False

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos
        self._last = threading.local()

    @abstractmethod
    def wide(self, name: str) -> Tensor:
        """A tensor in the dtype of its computation, not yet rounded to `infos[name].dtype`."""

    def __getitem__(self, name: str) -> Tensor:
        """Read or compute this tensor only, in the dtype of `infos`."""
        return self.wide(name).to(self.infos[name].dtype)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """The elements from start to stop of the flat tensor. A stored tensor is read in its stored dtype and only in
        this range; a computed one is computed whole by `wide`, and kept by each thread until it reads another."""
        if getattr(self._last, "name", None) != name:
            self._last.name = self._last.tensor = None  # freed before the next is computed
            self._last.tensor = self.wide(name)
            self._last.name = name
        return flat_part(self._last.tensor, start, stop)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor in consecutive flat blocks, with the values of `wide`: one block, unless it can be read or computed
        in smaller ones."""
        yield self.wide(name)

    def saved(self, name: str) -> Iterator[Tensor]:
        """The blocks to write to a file; the writer rounds them if necessary. OutputError for a tensor whose dtype or
        shape differs from `infos`."""
        tensor, info = self[name], self.infos[name]
        if TensorInfo.of(tensor) != info:
            raise OutputError(f"{name!r} was announced as {info} and came as {TensorInfo.of(tensor)}")
        yield tensor

    def file_of(self, _name: str) -> str | None:
        """The file that holds a tensor; None if it is computed, or in memory."""
        return None

    def where(self, name: str) -> str:
        """`file_of`, or else the name of the model: for messages."""
        return self.file_of(name) or self.name

    def info(self, name: str) -> TensorInfo:
        """The dtype and shape of a tensor; no tensor data is read."""
        return self.infos[name]

    def scanned(self, name: str) -> Tensor:
        """`wide`, checked: CheckpointError, with model and file, if it has NaN or infinity."""
        tensor = self.wide(name)
        scan(name, tensor, "/".join(filter(None, (self.name, self.file_of(name)))))
        return tensor

    def read(self, name: str) -> Tensor:
        """`scanned`, in at least float32, for arithmetic."""
        tensor = self.scanned(name)
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor

    def __contains__(self, name: object) -> bool:
        return name in self.infos  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    # `==` must not compare two models tensor by tensor.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Held(Lazy):
    """The tensors of any other mapping, such as a dictionary. infos: dtypes and shapes; by default tensors are read to
    find them."""

    computed = False

    def __init__(self, tensors: Mapping[str, Tensor], infos: Mapping[str, TensorInfo] | None = None) -> None:
        super().__init__({n: TensorInfo.of(tensors[n]) for n in tensors} if infos is None else infos)
        self.tensors = tensors
        self.at_hand = isinstance(tensors, dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].detach()

    def wide(self, name: str) -> Tensor:
        return self[name]

    def part(self, name: str, start: int, stop: int) -> Tensor:
        return flat_part(self[name], start, stop) if self.at_hand else super().part(name, start, stop)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, and how to read it: whole, or the elements from `start` to `stop` of the flat tensor."""

    info: TensorInfo
    file: str
    read: Callable[[], Tensor]
    part: Callable[[int, int], Tensor]


class StoredTensors(Lazy):
    """The tensors of a folder's weight files by name; each is read on demand, and not kept."""

    computed = False
    at_hand = True

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        super().__init__({name: one.info for name, one in stored.items()})
        self._stored = dict(stored)

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()

    def wide(self, name: str) -> Tensor:
        return self[name]

    def part(self, name: str, start: int, stop: int) -> Tensor:
        return self._stored[name].part(start, stop)

    def blocks(self, name: str) -> Iterator[Tensor]:
        part, numel = self._stored[name].part, self.infos[name].numel
        return (part(start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK))

    def saved(self, name: str) -> Iterator[Tensor]:
        return self.blocks(name)

    def file_of(self, name: str) -> str:
        return self._stored[name].file

    def renamed(self, old_names: Mapping[str, str]) -> StoredTensors:
        """The tensors under new names. old_names: the present name of each new one."""
        return StoredTensors({new: self._stored[old] for new, old in old_names.items()})


@dataclass(frozen=True)
class Rule:
    """How one tensor of a `Rewritten` is computed: `wide`, before it is rounded to the dtype of `info`.

    value: the tensor in that dtype, if there is a cheaper way than rounding `wide`. part: elements of the flat tensor,
    without the rest. blocks: for streaming, perhaps not rounded yet. what: describes the tensor in the error that is
    raised if its values do not fit in its dtype; without it there is no such check.
    """

    info: TensorInfo
    wide: Callable[[], Tensor]
    value: Callable[[], Tensor] | None = None
    part: Callable[[int, int], Tensor] | None = None
    blocks: Callable[[], Iterator[Tensor]] | None = None
    what: str = ""


class Rewritten(Lazy):
    """Tensors of a source, perhaps renamed, and tensors that are computed.

    rules: for each name, in order, the name of an unchanged tensor of the source, or a `Rule`. source: may be None if
    every name has a `Rule`. name: the model whose dtypes the results have, by default the source. Reading a tensor
    raises IncompatibleError if its values do not fit in its dtype and its rule has `what`.
    """

    def __init__(self, source: Lazy | None, rules: Mapping[str, str | Rule], name: str = "") -> None:
        self.source: Lazy = Held({}) if source is None else source
        super().__init__({n: self.source.info(r) if isinstance(r, str) else r.info for n, r in rules.items()})
        self.name = name or self.source.name
        self.rules = rules

    def __getitem__(self, name: str) -> Tensor:
        rule = self.rules[name]
        if isinstance(rule, str):
            return self.source[rule]
        dtype = rule.info.dtype
        tensor = (rule.wide if rule.value is None else rule.value)().to(dtype).contiguous()
        if rule.what and not is_finite(tensor):
            rule.wide()  # raises if the values are not finite before rounding either
            raise IncompatibleError(
                f"{name}: {rule.what} does not fit in {str(dtype).removeprefix('torch.')}, the dtype of {self.name}; "
                "convert that to a wider dtype first"
            )
        return tensor

    def wide(self, name: str) -> Tensor:
        rule = self.rules[name]
        return self.source.scanned(rule) if isinstance(rule, str) else rule.wide()

    def part(self, name: str, start: int, stop: int) -> Tensor:
        rule = self.rules[name]
        if isinstance(rule, str):
            return self.source.part(rule, start, stop)
        return super().part(name, start, stop) if rule.part is None else rule.part(start, stop)

    def blocks(self, name: str) -> Iterator[Tensor]:
        rule = self.rules[name]
        if isinstance(rule, str):
            return self.source.blocks(rule)
        return super().blocks(name) if rule.blocks is None else rule.blocks()

    def saved(self, name: str) -> Iterator[Tensor]:
        rule = self.rules[name]
        if isinstance(rule, str):
            return self.source.saved(rule)
        return super().saved(name) if rule.blocks is None else rule.blocks()

    def file_of(self, name: str) -> str | None:
        rule = self.rules[name]
        return self.source.file_of(rule) if isinstance(rule, str) else None


class Latest(Generic[K, V]):
    """A cache of one result, for the latest key, shared by all threads; freed before the next is computed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[K, V] | None = None

    def get(self, key: K, make: Callable[[], V]) -> V:
        with self._lock:
            if self._held is None or self._held[0] != key:
                self._held = None
                self._held = (key, make())
            return self._held[1]
