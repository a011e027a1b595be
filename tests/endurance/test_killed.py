"""Runs that are killed: before every call by which an output comes about, at random times, and politely. The next run
makes what an undisturbed one makes, byte for byte, and nothing is left."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.tiny import TEXT, of
from endurance.long_runs import Child, Forks, contents, models, nothing, save_small, save_until
from evaluation.task_cases import wordpiece
from symfuse.errors import OutputError

RESUME = {"resume": True, "fingerprint": "f"}
OVER = {"overwrite": True}


@pytest.fixture(autouse=True)
def nobody_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails here."""
    monkeypatch.setattr(os, "fsync", lambda _file: None)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="new", marks=pytest.mark.slow),
        pytest.param(RESUME, id="resume", marks=pytest.mark.slow),
        pytest.param(OVER, id="over", marks=pytest.mark.slow),
        pytest.param(OVER | RESUME, id="over, resume"),
    ],
)
def test_killed_before_any_call(tmp_path: Path, forks: Forks, options: dict[str, Any]) -> None:
    place = tmp_path / "run" / "out"
    save_small(tmp_path / "old", 1)
    before = contents(tmp_path / "old") if "overwrite" in options else {}
    calls = save_until(nothing, tmp_path / "expected", 2, **options)
    calls += ["rename"] if before else []  # of what is replaced
    expected = contents(tmp_path / "expected")
    apart = 0
    for number, name in enumerate(calls):
        shutil.rmtree(place.parent, ignore_errors=True)
        place.parent.mkdir()
        if before:
            shutil.copytree(tmp_path / "old", place)
        code = f"long_runs.save_until(long_runs.killed({number}), long_runs.Path({str(place)!r}), 2, **{options})"
        assert forks.start(f"os.fsync = lambda _file: None; {code}").wait() == -signal.SIGKILL, forks.log.read_text(
            "utf-8"
        )
        if before and not place.exists():  # between two renames: what is replaced has gone, what replaces it not come
            apart += 1
            [aside] = place.parent.glob(".out.old-*")
            assert contents(aside) == before
        else:
            assert contents(place) in (before, expected), f"before {name}, call {number}"
        if contents(place) != expected or before:
            save_small(place, 2, **options)
        assert contents(place) == expected, f"before {name}, call {number}"
        assert list(place.parent.iterdir()) == [place], f"before {name}, call {number}"
    assert apart == (1 if before else 0)


@pytest.mark.parametrize("options", [{}, OVER], ids=["new", "over"])
def test_what_was_set_aside_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    """Though the run after the one that was killed may not replace it, or fails."""
    save_small(tmp_path / ".out.old-0123abcd", 1)
    before = contents(tmp_path / ".out.old-0123abcd")
    with pytest.raises((OutputError, KeyError), match="stop" if options else "exists; choose another output"):
        save_small(tmp_path / "out", 2, progress=stop, **options)
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def stop(_name: str, _nbytes: int) -> None:
    raise KeyError("stop")


# ---- at random times


def killed_at_random(start: Callable[[], Child], out: Path, kills: int) -> None:
    """So often while they write; what comes to its end is as the first, which nobody disturbs, and then removed."""

    def until_it_writes(process: Child) -> float:
        while process.poll() is None and not any(out.parent.glob(".out.partial-*")):
            time.sleep(0.001)
        return time.monotonic()

    process = start()
    began = until_it_writes(process)
    assert process.wait() == 0
    span = time.monotonic() - began
    expected = contents(out)
    shutil.rmtree(out)
    rng = random.Random(0)
    while kills:
        process = start()
        until_it_writes(process)
        time.sleep(rng.random() * span)
        process.send_signal(signal.SIGKILL)
        kills -= process.wait() == -signal.SIGKILL
        if out.exists():
            assert contents(out) == expected
            shutil.rmtree(out)
    assert start().wait() == 0
    assert contents(out) == expected
    assert list(out.parent.iterdir()) == [out]


def test_killed_ten_times(tmp_path: Path, forks: Forks) -> None:
    folders = [str(folder) for folder in models(tmp_path / "models")]
    out = tmp_path / "run" / "out"
    out.parent.mkdir()
    args = ["merge", *folders, "-o", str(out), "--resume", "-q", "--method", "ties", "--base", folders[0]]
    args += ["--set", "density=0.5", "--max-shard-size", "500KB"]
    killed_at_random(lambda: forks.start(f"long_runs.weights.BATCH = 1; main({args})"), out, kills=10)


@pytest.mark.slow
def test_a_hundred_megabytes_killed_ten_times(tmp_path: Path) -> None:
    """By the installed command."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "head_dim": 64, "rows": 3000}
    folders = models(tmp_path / "models", layers=8, **sizes)
    assert (folders[0] / "model.safetensors").stat().st_size > 1e8
    out = tmp_path / "run" / "out"
    out.parent.mkdir()
    command = [Path(sys.executable).with_name("symfuse"), "merge", *folders, "-o", out, "--resume", "-q"]
    killed_at_random(lambda: subprocess.Popen(command, stderr=subprocess.DEVNULL), out, kills=10)


# ---- politely


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate("ab"):
        of("BertForMaskedLM", "BertConfig", TEXT)(seed).replace(files=wordpiece()).save(root / name)
    (root / "t.txt").write_text("the cat sat\non the mat\nand the hat\n" * 30, "utf-8")
    return root


VERBS = {
    "fisher": ["merge", "a", "b", "-o", "out", "--method", "fisher", "--data", "t.txt"],
    "barrier": ["barrier", "a", "b", "--data", "t.txt"],
    "learned": ["align", "a", "--to", "b", "-o", "out", "--from", "learned", "--data", "t.txt"],
}


@pytest.mark.parametrize(
    ("verb", "number"), list(zip(VERBS, (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM), strict=True))
)
def test_scratch_folders_go_with_the_run(
    tmp_path: Path, texts: Path, forks: Forks, verb: str, number: signal.Signals
) -> None:
    """Whatever verb they are of, once it has made one: of models that are computed, and of statistics."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = contents(texts)
    prepare = f"import tempfile; os.chdir({str(texts)!r}); tempfile.tempdir = {str(scratch)!r}; "
    prepare += f"long_runs.stuck(long_runs.Path({str(scratch)!r}), long_runs.Path({str(tmp_path / 'here')!r})); "
    process = forks.start(f"{prepare} main({VERBS[verb]})")
    while process.poll() is None and not (tmp_path / "here").exists():
        time.sleep(0.001)
    assert process.returncode is None, forks.log.read_text("utf-8")
    process.send_signal(number)
    assert process.wait() == 128 + number, forks.log.read_text("utf-8")
    assert list(scratch.iterdir()) == []
    assert contents(texts) == before
