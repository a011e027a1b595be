"""The Python of pages runs as it stands, from its first block to its last, and prints what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import symfuse
from contract.tiny import TEXT, of
from evaluation.task_cases import table, wordpiece
from symfuse.architectures import ARCHITECTURES

PAGE = Path(__file__).parents[1] / "docs" / "evaluation.md"
DECLARE = PAGE.with_name("declare.md")


def test_declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that the page shows is, but for its biases that may be translated, the one that its example writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ARCHITECTURES, "Speller", ARCHITECTURES["gpt2"])  # so that it is undone
    del ARCHITECTURES["Speller"]
    text = DECLARE.read_text("utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (file,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)
    assert len([line for line in example.splitlines() if line]) <= 30
    torch.manual_seed(0)
    scope: dict[str, object] = {"__name__": "docs"}
    exec(compile(example, str(DECLARE), "exec"), scope)
    covers, proof = capsys.readouterr().out.splitlines()
    assert f"    {covers}\n" in text
    assert proof.startswith("Proof(largest relative difference ")
    Path("mine.yml").write_text(file, "utf-8")
    shown, written = (symfuse.declare(scope["a"], name).to_json() for name in ("mine.yml", "speller.yml"))
    assert shown == written | {"shifts": [], "axes": shown["axes"]}
    assert {axis: written["axes"][axis] for axis in shown["axes"]} == shown["axes"]


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
