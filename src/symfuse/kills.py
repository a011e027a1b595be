"""Polite kills end a run as an interrupt does: what it has in hand is put away first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def kills_as_exceptions() -> Iterator[None]:
    """Let a polite kill, or a terminal that is closed, unwind the stack as SystemExit(128 + its number), and with it
    remove what is half written."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers belong to the main thread
        return
    # Another handler is not ours to replace, and nohup ignores SIGHUP on purpose.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]

    def stop(number: int, _frame: FrameType | None) -> None:
        for one in ours:  # often both come, and the second must not interrupt the cleaning up
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
