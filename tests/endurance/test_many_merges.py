"""Many merges in one process: memory, open files, threads and objects do not grow with their number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import symfuse
from endurance.long_runs import contents, models


@pytest.mark.slow
@pytest.mark.parametrize(("warm", "runs"), [(14, 24), (20, 200)])
def test_nothing_grows_and_a_leak_is_noticed(tmp_path: Path, warm: int, runs: int) -> None:
    """The leak, by the same measure: of a file, 200 kB, a thread and two objects in each of four merges."""
    models(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(__file__).with_name("many_merges.py"), tmp_path, str(warm), str(runs), "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    clean, leaking = json.loads(done.stdout.splitlines()[-1])
    assert clean == []
    noticed = {line.partition(":")[0] for line in leaking}
    assert noticed == {"memory", "files", "threads", "objects"}
    again = symfuse.merge([symfuse.open(tmp_path / name) for name in "abc"]).save(tmp_path / "again")
    assert contents(again) == contents(tmp_path / "out"), "the last merge is not what it is alone"
