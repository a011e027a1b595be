"""What an executor is: it does one piece of work for each of many items, in any order, until one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

Item = TypeVar("Item")
Result = TypeVar("Result")
Item_co = TypeVar("Item_co", covariant=True)
Result_co = TypeVar("Result_co", covariant=True)

# What is done for an item, on one BLAS thread. It returns early, with whatever, once the event is set: nobody waits for
# its result any more. Done elsewhere it is pickled with all that it holds; lazy models travel as names of files.
Work = Callable[[Item, threading.Event], Result]


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
