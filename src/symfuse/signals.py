"""Signals that end a run: they unwind the stack as exceptions, so that nothing half-written stays, and the process ends
with 128 + the number of the signal, whatever other libraries make of the exception."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Of the main thread, in which Python runs handlers: the signal that came first, and how many blocks defer it.
_received: int | None = None
_deferring = 0


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """The first signal raises: SIGINT KeyboardInterrupt, the others SystemExit(128 + number); later ones do not
    interrupt the clean-up. If the exception was replaced or swallowed on its way, it is raised again at the end."""
    global _received
    if not _in_main_thread():
        yield  # handlers belong to the main thread
        return
    # Another handler is not ours to replace, and nohup ignores SIGHUP on purpose.
    ours = {number: signal.getsignal(number) for number in ENDING}
    ours = {n: old for n, old in ours.items() if old in (signal.SIG_DFL, signal.default_int_handler)}
    for number in ours:
        signal.signal(number, _receive)
    try:
        yield
        _raise_received()
    except BaseException as error:
        if _received is not None and not _says(error, _received):
            raise _ending(_received) from error
        raise
    finally:
        if ours:
            _received = None
        for number, old in ours.items():
            signal.signal(number, old)


@contextmanager
def deferred() -> Iterator[None]:
    """A signal that comes in the block is raised at its end: a step and the note of it are not torn apart."""
    global _deferring
    if not _in_main_thread():
        yield
        return
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1
        _raise_received()


@contextmanager
def interruptible() -> Iterator[None]:
    """A signal is raised here, also inside of `deferred`: for what may take long, and leaves nothing behind."""
    global _deferring
    if not _in_main_thread():
        yield
        return
    outside, _deferring = _deferring, 0
    try:
        _raise_received()
        yield
    finally:
        _deferring = outside


def _receive(number: int, _frame: FrameType | None) -> None:
    global _received
    if _received is None:
        _received = number
        if not _deferring:
            raise _ending(number)


def _raise_received() -> None:
    """Raise what was deferred or swallowed, but not in place of an exception that is on its way."""
    if _received is not None and not _deferring and sys.exc_info()[1] is None:
        raise _ending(_received)


def _ending(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _says(error: BaseException, number: int) -> bool:
    """Whether an exception ends the process as the signal should."""
    if isinstance(error, SystemExit):
        return error.code == 128 + number
    return isinstance(error, KeyboardInterrupt) and number == signal.SIGINT


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
