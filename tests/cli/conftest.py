"""The working folder of a command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with all `originals` of the module in it."""
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
