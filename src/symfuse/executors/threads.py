"""The interface of executors: run one function on each of many items, in any order, until one call fails; and the
executor of this process, in threads."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from symfuse.errors import SymfuseError
from symfuse.signals import interruptible

Item = TypeVar("Item")
Result = TypeVar("Result")
Item_co = TypeVar("Item_co", covariant=True)
Result_co = TypeVar("Result_co", covariant=True)

# The function that is called for an item, on one BLAS thread. Once the event is set it returns early, with any value:
# the result is no longer used. In other processes it is pickled with all that it holds; lazy models are pickled as
# names of files.
Work = Callable[[Item, threading.Event], Result]
GRACE = 5.0  # seconds that workers get to notice that they should stop


@dataclass(frozen=True)
class Done(Generic[Item_co, Result_co]):
    """A finished item. where: a description of the worker; empty: a thread of this process."""

    item: Item_co
    result: Result_co
    where: str = ""


@runtime_checkable
class Running(Protocol[Item_co, Result_co]):
    """Work that has started. Iterating yields finished items, in any order, and raises the errors of the function."""

    def __iter__(self) -> Iterator[Done[Item_co, Result_co]]: ...

    def stop(self) -> bool:
        """Let all workers end. Returns whether they have, after a while."""

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` when no worker runs any more."""


@runtime_checkable
class Executor(Protocol):
    """Runs a function on many items at once."""

    @property
    def elsewhere(self) -> bool:
        """Whether other processes do the work: then the function is pickled, and files must be visible to all of
        them."""

    def start(
        self, work: Work[Item, Result], items: Sequence[Item], *, memory: Callable[[Item], int] | None = None
    ) -> Running[Item, Result]:
        """Start. memory: an estimate of the bytes that an item needs, by which the number of parallel items is
        limited."""

    def summary(self) -> dict[str, Any]:
        """A description of the executor and its work, for the document of a run."""


class Threads:
    """Work by threads of this process, at most `threads`, which share `memory` bytes (None: no limit)."""

    elsewhere = False

    def __init__(self, threads: int, memory: int | None = None) -> None:
        self.threads = threads
        self._budget = None if memory is None else Budget(memory)

    def start(
        self, work: Work[Item, Result], items: Sequence[Item], *, memory: Callable[[Item], int] | None = None
    ) -> _Workers[Item, Result]:
        """Start when the result is iterated; the iterating thread holds `one_torch_thread`."""
        budget = self._budget

        def room(item: Item) -> AbstractContextManager[None]:
            return nullcontext() if budget is None or memory is None else budget.hold(memory(item))

        return _Workers(items, work, min(len(items), self.threads), room)

    def summary(self) -> dict[str, Any]:
        return {"name": "local", "workers": self.threads}


class _Workers(Generic[Item, Result]):
    """Call `work(item, stop)` for each item, in threads that take the next one in order; yields finished items.

    `work` returns early if `stop` is set. Its errors, interrupts included, are raised by the iteration. room: resources
    for which an item may have to wait; after an error, no waiting item starts.
    """

    def __init__(
        self,
        items: Sequence[Item],
        work: Work[Item, Result],
        threads: int,
        room: Callable[[Item], AbstractContextManager[None]],
    ) -> None:
        self._left = deque(items)
        self._work = work
        self._room = room
        self._stop = threading.Event()
        self._results: SimpleQueue[Done[Item, Result] | BaseException | None] = SimpleQueue()
        self._most = threads
        self._threads: list[threading.Thread] = []

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and (taken := self._take()):
                with self._room(taken[0]):
                    if self._stop.is_set():
                        break
                    try:
                        done = Done(taken[0], self._work(taken[0], self._stop))
                    except BaseException:
                        self._stop.set()  # before another item takes the room
                        raise
                if not self._stop.is_set():
                    self._results.put(done)
            self._results.put(None)
        except BaseException as error:
            self._results.put(error)

    def _take(self) -> tuple[Item] | None:
        with suppress(IndexError):
            return (self._left.popleft(),)
        return None

    def __iter__(self) -> Iterator[Done[Item, Result]]:
        running = self._started()
        while running:
            with interruptible():
                result = self._results.get()
            if result is None:
                running -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield result

    def _started(self) -> int:
        """The number of workers: fewer, but at least one, where the system starts no more threads."""
        for number in range(self._most):
            # A thread inside a long computation cannot be interrupted; the interpreter does not wait for daemons.
            thread = threading.Thread(target=self._run, name=f"worker {number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if number == 0:
                    raise SymfuseError(
                        f"no worker thread can be started ({error}); end other programs, or raise the limit (ulimit -u)"
                    ) from error
                break
            self._threads.append(thread)
        return len(self._threads)

    def stop(self) -> bool:
        """Let all workers end. Returns whether they have, after a while."""
        self._stop.set()
        deadline = time.monotonic() + GRACE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` once the last worker has ended."""

        def wait() -> None:
            for thread in self._threads:
                thread.join()
            then()

        with suppress(RuntimeError):  # no more threads can be started; then the files are closed with the process
            threading.Thread(target=wait, daemon=True).start()


class Budget:
    """Bytes that threads share: a thread that needs more than is free waits, unless it would be the only one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        self._free = threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        with self._free:
            self._free.wait_for(lambda: not self._held or self._held + nbytes <= self.limit)
            self._held += nbytes
        try:
            yield
        finally:
            with self._free:
                self._held -= nbytes
                self._free.notify_all()


_lock = threading.Lock()
_users = 0
_torch_threads = 1


@contextmanager
def one_torch_thread() -> Iterator[int]:
    """One BLAS thread for each thread of ours: parallel by tensor, never by both.

    torch's number of threads belongs to the process: the first of overlapping users sets it, the last restores it.
    Yields the previous number.
    """
    global _users, _torch_threads
    with _lock:
        if _users == 0:
            _torch_threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _users += 1
    try:
        yield _torch_threads
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                torch.set_num_threads(_torch_threads)


def keep_freed_memory() -> None:
    """Ask glibc not to return freed blocks to the system: a merge allocates blocks of the same sizes many times, and
    each new page costs a fault. For processes of our own; without glibc, nothing happens."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option, value in ((M_TRIM_THRESHOLD, 2**28), (M_MMAP_THRESHOLD, 2**25), (M_TOP_PAD, 2**24)):
            libc.mallopt(option, value)


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h; 2**25 is the most that it takes for the last
