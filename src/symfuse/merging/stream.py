"""One tensor of several models, block by block: the input of a merge method.

Blocks are copied to a device and back while it computes: pinned memory, and streams of their own (`torch.cuda.Stream`),
so that neither the host nor the device waits for a copy that it does not need yet.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from symfuse.device import CPU, require
from symfuse.io import scan

# Elements that are read at once. Random masks are seeded per stretch of this length: changing it changes the masks of a
# seed.
BLOCK = 2**21
# Elements that methods process at once: few enough that intermediate results stay in the processor's cache, and enough
# that workers do not wait for each other between two operations.
PIECE = 2**19


class Transfers:
    """Copies to a CUDA device and from it, for one thread. Reading is one block ahead of the arithmetic, and writing
    one behind: at most two blocks are on either side at a time.

    Pinned memory is torch's own cache, which reuses a block only after its copy has ended.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(require(device))
        self._up, self._down = (torch.cuda.Stream(self.device) for _ in range(2))  # type: ignore[no-untyped-call]

    def sent(self, read: Sequence[Tensor], dtype: torch.dtype) -> Callable[[], list[Tensor]]:
        """Start copies of tensors to the device, in that dtype; the caller may overwrite them. The result, when called,
        makes the current stream wait and returns them; the host does not wait."""
        current = torch.cuda.current_stream(self.device)
        there = [tensor.to(dtype, copy=True) if tensor.device == self.device else None for tensor in read]
        with torch.cuda.stream(self._up):
            sent = [
                tensor.contiguous().pin_memory().to(self.device, non_blocking=True).to(dtype) if own is None else own
                for tensor, own in zip(read, there, strict=True)
            ]
            done = self._up.record_event()

        def arrived() -> list[Tensor]:
            current.wait_event(done)
            for tensor in sent:
                tensor.record_stream(current)  # the next block does not get its memory while it is in use
            return sent

        return arrived

    def fetched(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """The blocks on the host, each copied while the next one is made."""
        before: Callable[[], Tensor] | None = None
        for block in blocks:
            after = self._fetch(block)
            if before is not None:
                yield before()
            before = after
        if before is not None:
            yield before()

    def _fetch(self, block: Tensor) -> Callable[[], Tensor]:
        here = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        block.record_stream(self._down)
        with torch.cuda.stream(self._down):
            here.copy_(block, non_blocking=True)
            done = self._down.record_event()

        def arrived() -> Tensor:
            done.synchronize()
            return here

        return arrived


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
    """The statistics of one model for one of its tensors. values: numbers beside its tensors, by name."""

    @property
    def values(self) -> Mapping[str, Any]: ...

    def read(self, key: str) -> Tensor:
        """One of its tensors."""

    def part(self, key: str, start: int, stop: int) -> Tensor:
        """Some elements of it, flat."""


@dataclass(frozen=True)
class Block:
    """Some rows of one tensor of each model: (rows, columns), in the working dtype; methods may overwrite them.

    index: the number of their stretch. first: the number of their first element in the tensor.
    """

    index: int
    tensors: tuple[Tensor, ...]
    base: Tensor | None = None
    first: int = 0

    @property
    def origin(self) -> Tensor:
        """The base, of methods that require one."""
        assert self.base is not None
        return self.base

    def deltas(self) -> list[Tensor]:
        """Task vectors: each model minus the base (Ilharco et al. 2023, arXiv 2212.04089); new tensors at each call."""
        return [tensor - self.origin for tensor in self.tensors]


class Stream:
    """One tensor of k models, and perhaps of a base; iterate as often as needed, each time over all blocks in order.

    A tensor is treated as a matrix: all dimensions but the last are rows, a vector is one row. It is read in stretches
    of about BLOCK elements (`block`), and processed in blocks of about PIECE (on a device: in whole stretches), both of
    whole rows. dtype: the working dtype. statistics: one for each source, None where a tensor has none. CheckpointError
    if an input holds NaN or infinity.
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
        device: str = CPU,
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
        self._transfers = None if device == CPU else Transfers(device)
        self.columns = shape[-1] if len(shape) > 1 else math.prod(shape)
        self.rows = math.prod(shape) // self.columns if self.columns else 0
        self._step = max(1, block // max(1, self.columns))
        seen = min(block, PIECE) if self._transfers is None else block
        self._seen = max(1, seen // max(1, self.columns)) * max(1, self.columns)  # elements
        self._scanned: set[tuple[int, int]] = set()

    @property
    def count(self) -> int:
        """The number of tensors in a block, without the base."""
        return len(self.sources)

    def __len__(self) -> int:
        """The number of stretches; one without elements, for an empty tensor."""
        return max(1, -(-self.rows // self._step))

    def __iter__(self) -> Iterator[Block]:
        for index, stretch in enumerate(self._arriving()):
            start, stop = self.span(index)
            for first in range(start, max(stop, start + 1), self._seen):
                at = slice(first - start, first - start + self._seen)
                tensors = [self._rows(i, first, tensor[at]) for i, tensor in enumerate(stretch)]
                yield Block(index, tuple(tensors[: self.count]), None if self.base is None else tensors[-1], first)

    def span(self, index: int) -> tuple[int, int]:
        """The range of a stretch's elements in the flattened tensor."""
        first = index * self._step
        return first * self.columns, min(self.rows, first + self._step) * self.columns

    def whole(self) -> Block:
        """All rows at once, in the tensor's own shape: for methods that need the whole matrix."""
        blocks = list(self)
        tensors = tuple(torch.cat([b.tensors[i] for b in blocks]).reshape(self.shape) for i in range(self.count))
        base = None if self.base is None else torch.cat([b.origin for b in blocks]).reshape(self.shape)
        return Block(0, tensors, base)

    def random_seed(self, model: int, block: int) -> int:
        """A seed for random numbers that depends only on the recipe's seed, the names of tensor and model, and the
        stretch: not on the order of tensors or models, threads or shards. (Models of the same name are distinguished by
        order.)"""
        name = self.sources[model].model
        twin = sum(source.model == name for source in self.sources[:model])
        text = f"{self.seed}\0{self.name}\0{name}\0{twin}\0{block}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")

    def fetched(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """The results of the blocks, on the processor."""
        return iter(blocks) if self._transfers is None else self._transfers.fetched(blocks)

    def _arriving(self) -> Iterator[list[Tensor]]:
        """The tensors of each stretch, flattened, the base last; on a device, each is copied while the one before is
        used."""
        if self._transfers is None:
            for index in range(len(self)):
                yield [source.read(*self.span(index)) for source in self._all]
            return
        following = self._sent(0)
        for index in range(len(self)):
            here, following = following, self._sent(index + 1)
            yield here()

    def _sent(self, index: int) -> Callable[[], list[Tensor]]:
        """Start to copy a stretch to the device; nothing after the last one."""
        assert self._transfers is not None
        reads = [source.read(*self.span(index)) for source in self._all] if index < len(self) else []
        return self._transfers.sent(reads, self.dtype)

    @property
    def _all(self) -> tuple[Source, ...]:
        return self.sources if self.base is None else (*self.sources, self.base)

    def _rows(self, model: int, first: int, elements: Tensor) -> Tensor:
        """In the working dtype, apart from what was read."""
        tensor = elements.to(self.dtype, copy=self._transfers is None)
        if (model, first) not in self._scanned:  # what is read again was checked the first time
            scan(self.name, tensor, self._all[model].where)
            self._scanned.add((model, first))
        return tensor.reshape(tensor.numel() // max(1, self.columns), self.columns)
