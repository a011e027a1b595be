"""One process to fork from for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from endurance.long_runs import Forks


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    made = Forks(tmp_path_factory.mktemp("forks") / "errors.txt")
    yield made
    made.close()
