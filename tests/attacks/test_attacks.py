"""Mutants of every kind of input, through the verbs that read it: each works, or ends with one clear message.

A few of a fixed seed here; 2,000 of each kind, in processes with a limit of time and memory, where slow tests run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks.kinds import KINDS, attack, prepare, unclear
from attacks.worker import campaign

FEW, MANY = 12, 2_000


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacks") / "valid"
    prepare(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_mutants(kind: str, valid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = valid.parent / f"work-{kind}"
    work.mkdir()
    monkeypatch.chdir(work)
    wrong = [
        (seed, verb, problem) for seed in range(FEW) for verb, problem in attack(kind, seed, valid, work) if problem
    ]
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutants(kind: str, valid: Path) -> None:
    assert not campaign(kind, 0, MANY, valid.parent)


def test_what_is_unclear_is_noticed() -> None:
    """The control: what the attacks look for is found where it is."""
    assert not unclear(0, "all is well\n", "")
    assert not unclear(3, "", "symfuse: config.json has model_type [], expected a name\n")
    assert "0 messages" in unclear(1, "", "something\n")
    assert "2 messages" in unclear(3, "", "symfuse: one\nsymfuse: two\n")
    assert "prints" in unclear(3, "", "symfuse: a\u202eb\n")
    assert "a traceback" in unclear(1, "", "Traceback (most recent call last):\n")
    assert "characters" in unclear(3, "", f"symfuse: {'x' * 5_000}\n")
