"""Threads: what waits for memory does not begin any more once another fails, or all are to stop."""

from __future__ import annotations

import threading

import pytest

from symfuse.executors import Running, Threads


class Three:
    """Three items for two threads that have memory for one. The first needs none; while the second is at work, the
    third waits."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.begun: list[int] = []
        self.waits = threading.Event()

    def start(self) -> Running[int, None]:
        return Threads(2, memory=1).start(self.work, [0, 1, 2], memory=self.memory)

    def memory(self, item: int) -> int:
        if item == 2:
            self.waits.set()
        return min(item, 1)

    def work(self, item: int, stop: threading.Event) -> None:
        self.begun.append(item)
        if item == 1:
            assert self.waits.wait(60)
            if self.fails:
                raise ValueError("no")
            assert stop.wait(60)


def test_when_another_fails() -> None:
    three = Three(fails=True)
    running = three.start()
    with pytest.raises(ValueError, match="no"):
        list(running)
    assert running.stop()
    assert sorted(three.begun) == [0, 1]


def test_when_all_are_to_stop() -> None:
    three = Three(fails=False)
    running = three.start()
    assert next(iter(running)).item == 0
    assert three.waits.wait(60)
    assert running.stop()
    assert sorted(three.begun) == [0, 1]
