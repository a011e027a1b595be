"""The Python of docs/evaluation.md runs as it stands, from its first block to its last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contract.tiny import TEXT, of
from evaluation.task_cases import table, wordpiece

PAGE = Path(__file__).parents[1] / "docs" / "evaluation.md"


def test_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        of("BertForMaskedLM", "BertConfig", TEXT)(seed).replace(files=wordpiece()).save(f"model-{name}")
    Path("texts.txt").write_text("\n".join(row["text"] for row in table().rows), "utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(blocks) >= 4
    scope: dict[str, object] = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    printed = capsys.readouterr().out
    assert "permutation" in printed
    assert "'rewritten'" in printed
    assert "<title>A and B</title>" in Path("page.html").read_text("utf-8")
