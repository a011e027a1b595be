"""Every example runs as it stands and says what its docstring promises."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the script that it is, in this process, where warnings are errors; with small sizes if it has them."""
    text = example.read_text("utf-8")
    if "sklearn" in text:
        pytest.importorskip("sklearn", reason="scikit-learn is not installed; it comes with the extra `experiments`")
    quick = ["--quick"] if "--quick" in text else []
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path), *quick])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_there_are_examples() -> None:
    assert EXAMPLES
