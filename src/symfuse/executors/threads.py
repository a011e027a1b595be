"""What an executor is: it does one piece of work for each of many items, in any order, until one fails; and the one of
this process, in threads."""

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

# What is done for an item, on one BLAS thread. It returns early, with whatever, once the event is set: nobody waits for
# its result any more. Done elsewhere it is pickled with all that it holds; lazy models travel as names of files.
Work = Callable[[Item, threading.Event], Result]
GRACE = 5.0  # seconds that workers get to notice that they should stop


@dataclass(frozen=True)
class Done(Generic[Item_co, Result_co]):
    """An item that is done. where: by whom, in words; empty: by a thread of this process."""

    item: Item_co
    result: Result_co
    where: str = ""


@runtime_checkable
class Running(Protocol[Item_co, Result_co]):
    """Work that has started. Iterated, it yields what is done, in any order, and raises what the work raised."""

    def __iter__(self) -> Iterator[Done[Item_co, Result_co]]: ...

    def stop(self) -> bool:
        """Let all end; whether everything has, after a while."""

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` once nothing runs any more."""


@runtime_checkable
class Executor(Protocol):
    """Does work for many items at once."""

    @property
    def elsewhere(self) -> bool:
        """Whether other processes do the work: then it is pickled, and files must be where all of them see them."""

    def start(
        self, work: Work[Item, Result], items: Sequence[Item], *, memory: Callable[[Item], int] | None = None
    ) -> Running[Item, Result]:
        """Begin. memory: about how many bytes an item takes, so that not too many are done at once."""

    def summary(self) -> dict[str, Any]:
        """What it was and did, for the document of a run."""


class Threads:
    """Work by threads of this process, at most `threads`, which share `memory` bytes (None: as much as they like)."""

    elsewhere = False

    def __init__(self, threads: int, memory: int | None = None) -> None:
        self.threads = threads
        self._budget = None if memory is None else Budget(memory)

    def start(
        self, work: Work[Item, Result], items: Sequence[Item], *, memory: Callable[[Item], int] | None = None
    ) -> _Workers[Item, Result]:
        """Begin, when what is done is iterated over; who does that holds `one_torch_thread`."""
        budget = self._budget

        def room(item: Item) -> AbstractContextManager[None]:
            return nullcontext() if budget is None or memory is None else budget.hold(memory(item))

        return _Workers(items, work, min(len(items), self.threads), room)

    def summary(self) -> dict[str, Any]:
        return {"name": "local", "workers": self.threads}


class _Workers(Generic[Item, Result]):
    """`work(item, stop)` for each item, in threads that take the next one in order; iterate over what is finished.

    `work` returns early if `stop` is set. What it raises, an interrupt included, is raised by the iteration. room: what
    an item may have to wait for; once one fails, none that waited begins.
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
                        self._stop.set()  # before another has the room
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
        """How many workers there are: fewer, but one at least, where the system starts no more threads."""
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
        """Let all workers end; whether they have, after a while."""
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

        with suppress(RuntimeError):  # of no more threads; then the files are closed with the process
            threading.Thread(target=wait, daemon=True).start()


class Budget:
    """Bytes that threads share: who wants more than is left waits, but for one who would be alone."""

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
    Gives the number that it was.
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
    """Ask glibc not to give freed blocks back to the system: a merge allocates blocks of the same sizes many times,
    and each new page costs a fault. For processes of our own; elsewhere, and without glibc, nothing happens."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option, value in ((M_TRIM_THRESHOLD, 2**28), (M_MMAP_THRESHOLD, 2**25), (M_TOP_PAD, 2**24)):
            libc.mallopt(option, value)


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h; 2**25 is the most that it takes for the last
