"""D24, D44: a signal at any time ends the run in 128 + its number; threads that cannot be started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from command import everything, run
from symfuse import readahead, signals
from symfuse.executors import Threads
from symfuse.io import Checkpoint

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def child(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


# ---- while tensors are read, in whichever thread

SIGNALLED = """
    import os, sys
    from functools import partial
    from symfuse.__main__ import main
    from symfuse.io import safetensors_file as module

    number, at, swallow, *arguments = sys.argv[1:]
    calls = 0

    def sent(real, *given):
        global calls
        calls += 1
        if calls >= int(at):  # twice in a row, and at every later read too
            try:
                os.kill(os.getpid(), int(number))
                os.kill(os.getpid(), int(number))
            except BaseException as error:  # as libraries with callbacks do
                if swallow == "replaced":
                    raise ValueError("an error of a library") from error
                if swallow != "swallowed":
                    raise
        return real(*given)

    module._part = partial(sent, module._part)
    sys.argv[1:] = arguments
    main()
"""


@pytest.mark.parametrize(
    ("number", "at", "swallow", "verb"),
    [
        (signal.SIGINT, 1, "raised", ["merge", "a", "b", "-o", "{}"]),
        (signal.SIGTERM, 2, "replaced", ["align", "a", "--to", "b", "-o", "{}", "--axes", "ffn", "--no-verify"]),
        (signal.SIGHUP, 30, "swallowed", ["merge", "a", "b", "-o", "{}"]),
    ],
    ids=["raised", "replaced", "swallowed"],
)
def test_d24_signalled_while_tensors_are_read(
    models: Path, tmp_path: Path, number: signal.Signals, at: int, swallow: str, verb: list[str]
) -> None:
    arguments = [str(models / word) if word in "ab" else word.format(tmp_path / "out") for word in verb]
    done = child(SIGNALLED, str(number.value), str(at), swallow, *arguments)
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- at each step of writing

STEPS = """
    import os, sys
    import torch
    from symfuse.io import Checkpoint
    from symfuse.signals import signals_as_exceptions

    folder, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = Checkpoint({name: torch.ones(3) for name in ("w", "v")}, {}, name="new")

    def run(place, at):
        calls = 0

        def step(frame, event, _argument):
            nonlocal calls
            if event in ("call", "return") and "symfuse/io" in frame.f_code.co_filename:
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), number)

        with signals_as_exceptions():
            sys.setprofile(step)
            try:
                model.save(place + "/out", overwrite=True, threads=1)
            finally:
                sys.setprofile(None)
        return calls

    total = run(folder + "/0", 0)
    print(total)
    for n in range(1, count):
        child = os.fork()
        if not child:
            try:
                run(f"{folder}/{n}", total * n // count)
            except SystemExit as error:
                os._exit(error.code)
            except KeyboardInterrupt:
                os._exit(130)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_d24_signalled_at_any_step_of_writing(tmp_path: Path, number: signal.Signals) -> None:
    """Spread over all calls and returns of the code that writes: the old model is there, or the new, and no more."""
    count = 24
    old = Checkpoint({"w": torch.zeros(3), "v": torch.zeros(3)}, {}, name="old").save(tmp_path / "old" / "out")
    assert isinstance(old, Path)
    for n in range(count):
        shutil.copytree(tmp_path / "old", tmp_path / str(n))
    done = child(STEPS, str(tmp_path), str(number.value), str(count))
    total, *codes = map(int, done.stdout.split())
    assert total > 100
    assert codes == [128 + number] * (count - 1), done.stderr
    new = everything(tmp_path / "0")
    found = [everything(tmp_path / str(n)) for n in range(1, count)]
    assert all(one in (new, everything(tmp_path / "old")) for one in found)
    assert found[0] == everything(tmp_path / "old") != found[-1]


# ---- while it imports


@pytest.mark.parametrize(
    ("module", "number"), list(zip(["click", "torch", "symfuse.recipes.run"], NUMBERS, strict=True)), ids=str
)
def test_d24_signalled_while_it_imports(models: Path, tmp_path: Path, number: signal.Signals, module: str) -> None:
    code = """
        import os, sys
        name, number, *arguments = sys.argv[1:]

        class Finder:
            def find_spec(self, found, path=None, target=None):
                if found == name:
                    os.kill(os.getpid(), int(number))

        sys.meta_path.insert(0, Finder())
        sys.argv[1:] = arguments
        from symfuse.__main__ import main
        main()
    """
    arguments = ["merge", str(models / "a"), str(models / "b"), "-o", str(tmp_path / "out")]
    done = child(code, module, str(number.value), *arguments)
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- the mechanism


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_d24_a_deferred_signal_comes_at_the_end_of_the_block() -> None:
    done = []

    def block() -> None:
        with signals.signals_as_exceptions(), signals.deferred():
            send()
            done.append("the rest of the block")

    with pytest.raises(SystemExit) as caught:
        block()
    assert caught.value.code == 143
    assert done == ["the rest of the block"]


def test_d24_what_may_take_long_is_interrupted_all_the_same() -> None:
    done = []

    def block() -> None:
        with signals.signals_as_exceptions(), signals.deferred(), signals.interruptible():
            send(signal.SIGINT)
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == []


def test_d24_the_second_signal_does_not_interrupt_the_cleaning_up() -> None:
    cleaned = []

    def work() -> None:
        try:
            send()
        finally:
            send(signal.SIGINT)
            cleaned.append(True)

    with pytest.raises(SystemExit) as caught, signals.signals_as_exceptions():
        work()
    assert caught.value.code == 143
    assert cleaned == [True]
    assert [signal.getsignal(n) for n in NUMBERS] == [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL]
    with signals.signals_as_exceptions(), signals.deferred():
        pass  # what came before is forgotten


# ---- D44: threads


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_d44_reading_ahead_is_optional(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda self: (no_thread if self.name == "read ahead" else start)(self)
    )
    assert readahead.read_ahead([str(models / "a")]) is None
    result = run("merge", str(models / "a"), str(models / "b"), "-o", str(tmp_path / "out"), "-q")
    assert result.exit_code == 0, result.output


def test_d44_fewer_workers_than_asked_for_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def some(self: threading.Thread) -> None:
        if len(started) == 2:
            no_thread(self)
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", some)
    running = Threads(5).start(lambda item, _stop: item * item, range(20))
    assert sorted(done.result for done in running) == [item * item for item in range(20)]
    assert running.stop()
    assert len(started) == 2


def test_d44_no_thread_at_all_is_one_clear_error(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    for verb, to in (("merge", ()), ("align", ("--to",))):
        result = run(verb, str(models / "a"), *to, str(models / "b"), "-o", str(tmp_path / "out"))
        assert result.exit_code == 1, result.output
        assert "start new thread" in result.stderr
        assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []
