"""The Python of pages runs as it stands, from its first block to its last, and prints what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import symfuse
from command import done
from contract.tiny import MODELS, TEXT, of
from evaluation.task_cases import table, wordpiece
from reference.libraries import TimmViT, random, saved, timm_config
from symfuse.architectures import ARCHITECTURES
from symfuse.verification import TOLERANCE

PAGE = Path(__file__).parents[1] / "docs" / "evaluation.md"
CONVERSIONS = PAGE.with_name("conversions.md")
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


def test_conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script converts, and each of its commands finds its two models equal."""
    monkeypatch.chdir(tmp_path)
    text = CONVERSIONS.read_text("utf-8")
    module = random(TimmViT(), 0).float()
    state = module.state_dict()
    saved(module, Path("timm-vit"), timm_config())
    torch.save(state, "vit.pt")
    trained = {f"net.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": trained, "pytorch-lightning_version": "2.5.0"}, "last.ckpt")
    names, _ = re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)
    Path("names.yml").write_text(names, "utf-8")
    gpt2 = MODELS["gpt2-lm"](0)
    gpt2.save("gpt2")
    ends = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    torch.save({name: gpt2[name].mT.contiguous() if name.endswith(ends) else gpt2[name] for name in gpt2}, "nanogpt.pt")
    (script,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    Path("convert.py").write_text(script, "utf-8")
    monkeypatch.setattr(sys, "argv", ["convert.py", "vit.pt", "converted"])
    runpy.run_path("convert.py")
    symfuse.open("converted").to(torch.bfloat16).save("converted-bf16")
    commands = re.findall(r"^(?:      - run: )?symfuse (verify .*?)(?: +#.*| > .*)?$", text, re.M)
    assert len(commands) == 8
    for command in commands:
        done(*command.split())
    (row,) = re.findall(r"^\| (1e-11 .*) \|$", text, re.M)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    assert [float(number) for number in row.split("|")] == [TOLERANCE[dtype] for dtype in dtypes]


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
