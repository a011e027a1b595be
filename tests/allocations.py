"""Bytes that torch and Python are asked for, added up one by one: the same on every machine and under every load,
unlike what is resident. Files that are mapped are not counted, nor what a kernel of torch takes for itself."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

TAKES_OVER = torch.ops.aten.lift_fresh.default  # a tensor that torch has made already, such as torch.tensor([1])


class Allocations:
    """held: bytes that were asked for since the beginning and not given back. peak: the most that were held at once.

    Of torch, the storages that its operations make; of Python and NumPy, what tracemalloc sees.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a storage may go while another is noted
        self._sizes: dict[int, int] = {}
        self._others: weakref.WeakValueDictionary[int, UntypedStorage] = weakref.WeakValueDictionary()
        self._torch = self._peak = 0
        self._start = tracemalloc.get_traced_memory()[0]

    @property
    def held(self) -> int:
        return self._torch + tracemalloc.get_traced_memory()[0] - self._start

    @property
    def peak(self) -> int:
        self.look()
        return self._peak

    def look(self) -> None:
        """How much Python has held since the last time, beside what torch holds."""
        with self._lock:
            self._peak = max(self._peak, self._torch + tracemalloc.get_traced_memory()[1] - self._start)
            tracemalloc.reset_peak()

    def given(self, storage: UntypedStorage) -> None:
        """To an operation. What none has made was there before."""
        if id(storage) not in self._sizes:
            self._others[id(storage)] = storage

    def made(self, storage: UntypedStorage) -> None:
        """By an operation, or made larger. What cannot be is memory of a file or of Python."""
        number, size = id(storage), storage.nbytes()  # a storage is one object as long as its memory lives
        if number in self._others or not storage.resizable():
            return
        with self._lock:
            if number not in self._sizes:
                weakref.finalize(storage, self._gone, number).atexit = False
            self._change(size - self._sizes.get(number, 0))
            self._sizes[number] = size

    def _gone(self, number: int) -> None:
        with self._lock:
            self._change(-self._sizes.pop(number))

    def _change(self, nbytes: int) -> None:
        if nbytes:
            self.look()
            self._torch += nbytes


class _Counting(TorchDispatchMode):
    """In one thread."""

    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self.allocations = allocations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip what is never used here, a thousand modules would be imported

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note = self.allocations.made if function is TAKES_OVER else self.allocations.given
        for storage in _storages((args, kwargs)):
            note(storage)
        out = function(*args, **(kwargs or {}))
        for storage in _storages(out):
            self.allocations.made(storage)
        return out


def _storages(values: Any) -> Iterator[UntypedStorage]:
    for one in pytree.tree_leaves(values):
        if isinstance(one, Tensor) and one.device.type == "cpu":
            yield one.untyped_storage()
        elif isinstance(one, UntypedStorage):
            yield one


@contextmanager
def counted() -> Iterator[Allocations]:
    """What is asked for in this block, by this thread and those that are started in it. Cycles are not collected."""
    run = threading.Thread.run

    @wraps(run)
    def within(thread: threading.Thread) -> None:
        with _Counting(allocations):
            run(thread)

    with ExitStack() as stack:
        gc.disable()
        stack.callback(gc.enable)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        allocations = Allocations()
        stack.enter_context(mock.patch.object(threading.Thread, "run", within))
        stack.enter_context(_Counting(allocations))
        yield allocations
        allocations.look()
