"""The command line as a process of its own, with a cluster of its own, that is told to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import symfuse
from symfuse.io import Checkpoint

SHARDS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("models")
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        tensors = {f"layers.{n}.weight": torch.randn(1500, 1000, generator=rng) for n in range(SHARDS)}
        Checkpoint(tensors, {"model_type": "none"}, name="m").save(place / str(seed))
    return [str(place / str(seed)) for seed in range(3)]


def begun(folders: list[str], out: Path, *more: str) -> subprocess.Popen[str]:
    """A merge, when some of its files are written, and some are not."""
    command = [sys.executable, "-m", "symfuse", "merge", *folders, "-o", str(out), "--method", "della", "--base", "1"]
    command += ["--set", "density=0.5", "--executor", "ray", "--threads", "2", "--max-shard-size", "6MB", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not list(out.parent.glob(f".{out.name}.partial-*/model-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.slow  # a cluster each
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_told_to_stop_leaves_nothing(
    folders: list[str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = begun(folders, tmp_path / "out")
    process.send_signal(number)
    _, error = process.communicate(timeout=200)
    assert process.returncode == code, error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # two clusters
def test_a_run_that_is_killed_is_gone_on_from(folders: list[str], tmp_path: Path) -> None:
    process = begun(folders, tmp_path / "out", "--resume")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=200)
    assert process.returncode == 143, error
    assert f"of {SHARDS} tensors are kept" in error
    process = begun(folders, tmp_path / "out", "--resume")
    out, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    assert "written to" in out
    merged = symfuse.open(tmp_path / "out")
    plain = symfuse.merge(folders, method="della", base=0, parameters={"density": 0.5})
    for name in merged:
        assert torch.equal(merged[name], plain[name])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
