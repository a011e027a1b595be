"""Outputs of a run that appear together: all are whole before the first gets its name, or replaces an older one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from symfuse.signals import deferred


@runtime_checkable
class NewOutput(Protocol):
    """An output that is whole, but not yet under its name."""

    def commit(self, undo: ExitStack) -> None:
        """Give it its name; `undo` gets what takes each step back."""

    def finish(self) -> None:
        """All outputs have their names: remove what this one replaces."""

    def close(self, error: BaseException | None) -> None:
        """At the end, in any case. error: what prevented the outputs, of which nothing is to stay."""


_outputs: ContextVar[list[NewOutput] | None] = ContextVar("outputs", default=None)


@contextmanager
def together() -> Iterator[list[NewOutput]]:
    """What is written in the block, by whatever function, appears at its end: all of it, or nothing, and then what was
    to be replaced is as it was. Signals wait, but for `interruptible` blocks."""
    if (outer := _outputs.get()) is not None:
        yield outer
        return
    outputs: list[NewOutput] = []
    with deferred(), ExitStack() as closing:
        closing.push(lambda _kind, error, _trace: _close(outputs, error))
        token = _outputs.set(outputs)
        closing.callback(_outputs.reset, token)
        yield outputs
        with ExitStack() as undo:
            for output in outputs:
                output.commit(undo)
            undo.pop_all()
        for output in outputs:
            output.finish()


def _close(outputs: list[NewOutput], error: BaseException | None) -> None:
    for output in outputs:
        output.close(error)
