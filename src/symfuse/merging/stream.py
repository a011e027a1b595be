"""One tensor of several models, block by block: what a merge method reads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from symfuse.io import scan

# Elements of a block. Random masks are seeded by block, so this number is part of what a seed means.
BLOCK = 2**21


@dataclass(frozen=True)
class Source:
    """One model's tensor. read: a range of its elements, in stored order, flat, in any floating dtype.
    model: the name that seeds random numbers. where: for messages."""

    read: Callable[[int, int], Tensor]
    model: str = ""
    where: str = ""

    @classmethod
    def of(cls, tensor: Tensor, model: str = "", where: str = "") -> Source:
        """A tensor in memory."""
        flat = tensor.detach().reshape(-1)
        return cls(lambda start, stop: flat[start:stop], model, where)


@runtime_checkable
class Statistic(Protocol):
    """What the data of one model say of one of its tensors. values: numbers beside its tensors, by name."""

    @property
    def values(self) -> Mapping[str, Any]: ...

    def read(self, key: str) -> Tensor:
        """One of its tensors."""

    def part(self, key: str, start: int, stop: int) -> Tensor:
        """Some elements of it, flat."""


@dataclass(frozen=True)
class Block:
    """Some rows of one tensor of each model: (rows, columns), in the working dtype; methods may overwrite them."""

    index: int
    tensors: tuple[Tensor, ...]
    base: Tensor | None = None

    @property
    def origin(self) -> Tensor:
        """The base, of methods that require one."""
        assert self.base is not None
        return self.base

    def deltas(self) -> list[Tensor]:
        """Task vectors: each model less the base (Ilharco et al. 2023, arXiv 2212.04089); anew at each call."""
        return [tensor - self.origin for tensor in self.tensors]


class Stream:
    """One tensor of k models, and of a base perhaps; iterate as often as needed, each time over all blocks in order.

    A tensor is seen as a matrix: all dimensions but the last are rows, a vector is one row. Blocks are whole rows,
    about BLOCK elements. dtype: the working dtype. statistics: one for each source, None where a tensor has none.
    CheckpointError if an input holds NaN or infinity.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        sources: Sequence[Source],
        base: Source | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        block: int = BLOCK,
        device: str = "cpu",
        statistics: Sequence[Statistic | None] = (),
    ) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.sources = tuple(sources)
        self.base = base
        self.statistics = tuple(statistics) or (None,) * len(self.sources)
        self.dtype = dtype
        self.seed = seed
        self.device = device
        self.columns = shape[-1] if len(shape) > 1 else math.prod(shape)
        self.rows = math.prod(shape) // self.columns if self.columns else 0
        self._step = max(1, block // max(1, self.columns))
        self._scanned: set[tuple[int, int]] = set()

    @property
    def count(self) -> int:
        """How many tensors a block holds, without the base."""
        return len(self.sources)

    def __len__(self) -> int:
        """How many blocks there are; one without elements, for a tensor that has none."""
        return max(1, -(-self.rows // self._step))

    def __iter__(self) -> Iterator[Block]:
        for index in range(len(self)):
            tensors = tuple(self._rows(i, index) for i in range(len(self.sources)))
            yield Block(index, tensors, None if self.base is None else self._rows(-1, index))

    def span(self, index: int) -> tuple[int, int]:
        """The elements of a block: from which to which of the flat tensor."""
        first = index * self._step
        return first * self.columns, min(self.rows, first + self._step) * self.columns

    def whole(self) -> Block:
        """All rows at once, in the tensor's own shape: for methods that need the whole matrix."""
        blocks = list(self)
        tensors = tuple(torch.cat([b.tensors[i] for b in blocks]).reshape(self.shape) for i in range(self.count))
        base = None if self.base is None else torch.cat([b.origin for b in blocks]).reshape(self.shape)
        return Block(0, tensors, base)

    def random_seed(self, model: int, block: int) -> int:
        """A seed for random numbers that depends on the recipe's seed, the names of tensor and model, and the block
        only: not on the order of tensors or models, threads or shards. (Models of one name are told apart by order.)"""
        name = self.sources[model].model
        twin = sum(source.model == name for source in self.sources[:model])
        text = f"{self.seed}\0{self.name}\0{name}\0{twin}\0{block}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")

    def _rows(self, model: int, index: int) -> Tensor:
        source = self.sources[model] if model >= 0 else self.base
        assert source is not None
        start, stop = self.span(index)
        read = source.read(start, stop)
        rows = (stop - start) // max(1, self.columns)
        tensor = read.to(self.device, self.dtype, copy=True).reshape(rows, self.columns)
        if (model, index) not in self._scanned:  # what is read again has been looked at
            scan(self.name, tensor, source.where)
            self._scanned.add((model, index))
        return tensor
