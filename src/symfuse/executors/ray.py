"""Work as tasks of a Ray cluster: on any number of machines that share a file system. Nothing else imports ray.

The function is sent once, to Ray's object store: a lazy model is a few kilobytes of names, and its files are opened
again where a tensor is read. A task is then the number of an item. A task whose worker is lost is repeated; an error of
the function itself is raised here.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import platform
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple

import torch

from symfuse.errors import OptionError, SymfuseError
from symfuse.executors.threads import GRACE, Done, Item, Result, Work, keep_freed_memory, one_torch_thread
from symfuse.signals import interruptible

RETRIES = 3  # how many lost workers are tolerated for one item
LOST = ("WorkerCrashed", "NodeDied", "OutOfMemory", "ObjectLost")  # errors of Ray after which an item is repeated
MATTERS = ("symfuse", "torch", "numpy", "scipy", "numba")  # packages on which results may depend


class Ray:
    """A Ray cluster: that at `address` ("auto": that of this machine), or one of this machine alone, started and
    ended here. A cluster to which the process is connected already is taken as it is.

    workers: of the cluster started here, default one for each core. gpus: that each task takes. say: called with a line
    on each lost worker; note: with one on machines that differ or are missing; follow: with one on each item that is
    done, and where. OptionError without the package, or without the cluster.
    """

    elsewhere = True

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        gpus: int = 0,
        say: Callable[[str], None] = lambda _text: None,
        note: Callable[[str], None] = lambda _text: None,
        follow: Callable[[str], None] = lambda _text: None,
    ) -> None:
        # Ray's own messages about lost workers are reported by `say` instead.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise OptionError(
                f"executor ray needs the package of that name ({error}): pip install 'symfuse[ray]'"
            ) from error
        self.address = address or os.environ.get("RAY_ADDRESS")
        self.workers = workers
        self.gpus = gpus
        self.say = say
        self.say_note = note
        self.follow = follow
        self.retried = 0
        self._started = False
        self._tasks: Counter[tuple[str, int]] = Counter()  # by machine and process
        self._processors: set[str] = set()

    def connect(self) -> None:
        """Connect to the cluster, or start one, unless that is done: starting work does it too."""
        import ray

        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started by symfuse sends no usage data
        own: dict[str, Any] = {} if self.address else {"num_cpus": self.workers, "include_dashboard": False}
        before = signal.getsignal(signal.SIGTERM)  # which Ray replaces in the main thread
        try:
            ray.init(self.address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = f"at {self.address!r}" if self.address else "on this machine"
            raise OptionError(
                f"there is no Ray cluster {where} ({error}); `ray status` on its head says whether it runs; leave "
                "the address out to start one on this machine"
            ) from error
        finally:
            with suppress(ValueError):  # in another thread
                signal.signal(signal.SIGTERM, before)
        self._started = True
        there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        for kind, need in (("CPU", 1), ("GPU", self.gpus)):
            if there.get(kind, 0) < need:
                self.say_note(f"no machine of the Ray cluster has a {kind} now; tasks wait until one has")

    def __enter__(self) -> Ray:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the cluster, and stop it if it was started here."""
        import ray

        if self._started:
            ray.shutdown()
            self._started = False

    def start(
        self, work: Work[Item, Result], items: Sequence[Item], *, memory: Callable[[Item], int] | None = None
    ) -> _Tasks[Item, Result]:
        """Start; a function that cannot be pickled raises TypeError or PicklingError, errors of Ray itself
        SymfuseError."""
        self.connect()
        with _failures():
            return _Tasks(self, work, items, memory)

    def summary(self) -> dict[str, Any]:
        """workers: the processes that did work; retried: tasks that were repeated because their worker was lost."""
        machines = len({machine for machine, _ in self._tasks})
        counts = {"machines": machines, "tasks": self._tasks.total(), "retried": self.retried}
        return {"name": "ray", "workers": len(self._tasks), **counts}

    def note(self, item: object, worker: Worker) -> str:
        """Count a finished item; returns a description of its worker."""
        self._tasks[worker.machine, worker.process] += 1
        if worker.processor not in self._processors | {_worker().processor}:
            self.say_note(
                f"{worker.machine} computes with {worker.processor}, this machine with {_worker().processor}: "
                "the last bits of what it computes may be others"
            )
        self._processors.add(worker.processor)
        where = f"{worker.machine}, process {worker.process}"
        self.follow(f"{item}: {where}")
        return where


class Worker(NamedTuple):
    """The worker of a task. processor: the instruction set that torch uses there."""

    machine: str
    process: int
    processor: str


class _Tasks(Generic[Item, Result]):
    """The tasks of one call of `start`."""

    def __init__(
        self, cluster: Ray, work: Work[Item, Result], items: Sequence[Item], memory: Callable[[Item], int] | None
    ) -> None:
        import numpy as np
        import ray

        self._cluster = cluster
        self._items = items
        self._needs = [0 if memory is None else memory(item) for item in items]
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        self._most = max((int(n["Resources"].get("memory", 0)) for n in nodes if n["Alive"]), default=0)
        self._parcel = ray.put(np.frombuffer(packed((work, items)), np.uint8))
        self._task = ray.remote(_task())
        self._tries: Counter[int] = Counter()
        self._pending: dict[int, Any] = {}
        self._left: list[Any] = []  # of those, the ones that have not ended although they were stopped
        # Waiting for Ray itself turns signals into other errors.
        self._ended: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()

    def __iter__(self) -> Iterator[Done[Item, Result]]:
        import ray

        # The errors for a lost worker, machine or result.
        lost = tuple(getattr(ray.exceptions, f"{name}Error") for name in LOST)
        with _failures():
            for number in range(len(self._items)):
                self._submit(number)
            while self._pending:
                with interruptible():
                    number, future = self._ended.get()
                del self._pending[number]
                try:
                    worker, result = future.result()
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause if isinstance(error.cause, BaseException) else error
                    raise cause from None if isinstance(cause, SymfuseError) else error
                except lost as error:
                    self._again(number, error)
                    continue
                if worker is None:
                    raise OptionError(f"a worker of the Ray cluster cannot import symfuse ({result}); install it there")
                item = self._items[number]
                yield Done(item, result, self._cluster.note(item, worker))

    def _submit(self, number: int) -> None:
        self._tries[number] += 1
        # Lost workers are counted here, so Ray itself tries once. More memory than any machine has is never free.
        need = {"memory": need} if (need := min(self._needs[number], self._most)) else {}
        task = self._task.options(num_cpus=1, num_gpus=self._cluster.gpus, max_retries=0, **need)
        ref = task.remote([self._parcel], number, versions())
        self._pending[number] = ref
        ref.future().add_done_callback(lambda future: self._ended.put((number, future)))

    def _again(self, number: int, error: Exception) -> None:
        """Handle the loss of an item's worker."""
        item, why = self._items[number], _in_a_line(error)
        if self._tries[number] > RETRIES:
            raise SymfuseError(
                f"{item} was sent to {self._tries[number]} workers of the Ray cluster, and all were lost; the last: "
                f"{why}. They may have had too little memory (`ray logs` on the head says more)"
            ) from error
        self._cluster.retried += 1
        self._cluster.say(f"a worker was lost ({why}); what it had, {item}, is done again")
        self._submit(number)

    def stop(self) -> bool:
        """Cancel unfinished tasks: first by an interrupt, then by killing the worker."""
        import ray

        self._left, self._pending = list(self._pending.values()), {}
        with suppress(ray.exceptions.RayError):  # of a cluster that is gone: what ends the work says so
            for force in (False, True):
                for ref in self._left:
                    ray.cancel(ref, force=force, recursive=False)
                self._wait(GRACE)
        return not self._left

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` once the stopped tasks have ended too, or the cluster has."""
        import ray

        def wait() -> None:
            with suppress(ray.exceptions.RayError):
                self._wait(None)
            then()

        threading.Thread(target=wait, daemon=True).start()

    def _wait(self, seconds: float | None) -> None:
        """Wait for the remaining tasks, at most this long."""
        import ray

        if self._left:
            self._left = ray.wait(self._left, num_returns=len(self._left), timeout=seconds)[1]


@contextmanager
def _failures() -> Iterator[None]:
    """Errors of Ray itself as SymfuseError; the errors of the function stay as they are."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError:
        raise
    except RayError as error:
        raise SymfuseError(
            f"the Ray cluster has failed ({type(error).__name__}: {_in_a_line(error)}); `ray status` and `ray logs` on "
            "its head say more. Mend it and run this again; threads of this machine (--executor local) give the same "
            "result"
        ) from error


def _in_a_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(" .")


def _task() -> Callable[..., Any]:
    """The function of a Ray task, which is sent as code, so that a worker without symfuse can report that. A cancelled
    worker ends its process, since an interrupted import cannot be repeated."""

    def task(parcel, number, here):  # type: ignore[no-untyped-def]
        import os

        try:
            from symfuse.executors.ray import perform

            return perform(parcel[0], number, here)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "symfuse":
                raise
            return None, str(error)
        except KeyboardInterrupt:
            os._exit(1)

    return task


@functools.cache
def versions() -> dict[str, str]:
    """The versions of installed packages on which the bits of a result depend, beside the processor."""
    out = dict.fromkeys(MATTERS, "missing")
    for name in MATTERS:
        with suppress(metadata.PackageNotFoundError):
            out[name] = metadata.version(name)
    return out


_unpacked: tuple[str, Any] = ("", None)  # the parcel that this worker opened last, and what was in it


def perform(parcel: Any, number: int, here: dict[str, str]) -> tuple[Worker, Any]:
    """In a worker: the result for the item of that number. here: the versions of the caller, OptionError if others."""
    global _unpacked
    if (own := versions()) != here:
        differ = ", ".join(f"{name} {own[name]} (here {here[name]})" for name in MATTERS if own[name] != here[name])
        raise OptionError(
            f"a worker of the Ray cluster, on {platform.node()}, has {differ}; its results could be others. Install "
            "the same on all machines"
        )
    import ray
    from ray import cloudpickle

    if _unpacked[0] != parcel.hex():
        _unpacked = ("", None)  # gone before the next is there
        keep_freed_memory()
        _unpacked = (parcel.hex(), cloudpickle.loads(ray.get(parcel).data))
    work, items = _unpacked[1]
    with one_torch_thread():
        return _worker(), work(items[number], threading.Event())


def _worker() -> Worker:
    return Worker(platform.node(), os.getpid(), torch.backends.cpu.get_cpu_capability())


def packed(value: Any) -> bytes:
    """Pickled for another process: thread-local state is created again there, and paths are absolute."""
    from ray import cloudpickle

    made_anew = {type(threading.Lock()): threading.Lock, threading.local: threading.local}

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) in made_anew:
                return made_anew[type(obj)], ()
            if isinstance(obj, Path) and not obj.is_absolute():
                return type(obj), (os.path.abspath(obj),)  # noqa: PTH100 - keeps symbolic links
            if isinstance(obj, functools._lru_cache_wrapper) and "<" in obj.__qualname__:  # of no module
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)  # type: ignore[no-untyped-call]

    file = io.BytesIO()
    Pickler(file).dump(value)  # type: ignore[no-untyped-call]
    return file.getvalue()


def _cached(function: Callable[..., Any], how: dict[str, Any]) -> Any:
    return functools.lru_cache(**how)(function)
