"""The two models that most cases are about."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recipes.llama import llama
from symfuse.io import open as open_checkpoint


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny Llamas, a and b; nothing is written to it."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        llama(root / name, seed)
    return root


@pytest.fixture(scope="session")
def sharded(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """These two, and the first in several files, `shards`."""
    root = tmp_path_factory.mktemp("sharded")
    shutil.copytree(models, root, dirs_exist_ok=True)
    open_checkpoint(root / "a").save(root / "shards", max_shard_size="60KB")
    return root
