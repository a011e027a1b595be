"""The interface of executors: run one function on each of many items, in any order, until one call fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

Item = TypeVar("Item")
Result = TypeVar("Result")
Item_co = TypeVar("Item_co", covariant=True)
Result_co = TypeVar("Result_co", covariant=True)

# The function that is called for an item, on one BLAS thread. Once the event is set it returns early, with any value:
# the result is no longer used. In other processes it is pickled with all that it holds; lazy models are pickled as
# names of files.
Work = Callable[[Item, threading.Event], Result]


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
