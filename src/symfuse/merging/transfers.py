"""Copies of blocks to a device and back while it computes: pinned memory, and streams of their own
(`torch.cuda.Stream`), so that neither the host nor the device waits for a copy that it does not need yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from symfuse.device import require


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
