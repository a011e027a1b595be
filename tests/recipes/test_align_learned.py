"""Recipes whose models are aligned by a matching that is learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import symfuse
from command import done, run
from evaluation.task_cases import CASES
from symfuse.alignment import random_alignment
from symfuse.errors import OptionError
from symfuse.matching.learned import Learning
from symfuse.recipes import parse_recipe

BLOCK = "merge_method: linear\nmodels: [{{model: a}}, {{model: b}}]\nparameters: {{weight: 0.5}}\nalign: {align}\n"
GOOD = "{anchor: 2, axes: attention, source: learned, data: t.txt, validation: v.txt, steps: 3}"
TEXT = "abc def ghi\njkl mno\npqr abd tgh\nabc\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    checkpoint = CASES["masked"][1]()
    checkpoint.save("b")
    random_alignment(symfuse.declare(checkpoint), 3, axes=("qk", "v"))(checkpoint).save("a")
    Path("t.txt").write_text(TEXT, "utf-8")
    Path("v.txt").write_text(TEXT[:20], "utf-8")
    Path("r.yml").write_text(BLOCK.format(align=GOOD), "utf-8")
    return tmp_path


@pytest.mark.slow
def test_it_is_that_of_python(place: Path) -> None:
    said = done("check", "r.yml").stdout
    assert "learned" in said
    assert "t.txt" in said
    done("merge", "r.yml", "out")
    own = Learning(symfuse.task("masked-lm", "t.txt", "b"), symfuse.task("masked-lm", "v.txt", "b"), steps=3)
    alignment = symfuse.match("a", to="b", axes="attention", learn=own)
    expected = symfuse.merge([alignment(symfuse.open("a")), symfuse.open("b")], weights=[0.5, 0.5])
    merged = symfuse.open("out")
    for name in expected:
        torch.testing.assert_close(merged[name], expected[name], rtol=1e-6, atol=1e-7)
    (found,) = json.loads(Path("out/symfuse.json").read_text("utf-8"), parse_constant=pytest.fail)["alignments"]
    assert found["learning"]["steps"] == 3
    assert found["learning"]["history"] == alignment.provenance["learning"]["history"]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("{steps: 3}", "line 4: align.steps: only for `source: learned`; leave it out, or set that"),
        ("{validation: v.txt}", "line 4: align.validation: only for `source: learned`"),
        ("{source: activations, data: t.txt, steps: 3}", "line 4: align.steps: only for `source: learned`"),
        (
            "{source: activations, data: t.txt, validation: v.txt}",
            "line 4: align.validation: only for `source: learned`",
        ),
        ("{source: learned}", "line 4: align: `source: activations` and `source: learned` need `data: FILE`"),
        ("{source: learned, validation: v.txt}", "line 4: align: .* and `source: learned` need `data: FILE`"),
        ("{source: learned, data: t.txt, steps: 0}", "line 4: align.steps"),
        ("{source: learned, data: t.txt, steps: many}", "line 4: align.steps"),
        ("{source: learned, data: 3}", "line 4: align.data"),
    ],
)
def test_blocks_that_make_no_sense(block: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_recipe(BLOCK.format(align=block))


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["t.txt", "v.txt"])
def test_data_that_are_not_there_are_said_before_the_merge(missing: str, place: Path) -> None:
    Path(missing).unlink()
    for args in (("check", "r.yml"), ("merge", "r.yml", "out")):
        found = run(*args)
        assert found.exit_code not in (0, 1)
        assert missing in found.output
    assert not Path("out").exists()


@pytest.mark.slow
def test_too_few_data_are_said_before_the_merge(place: Path) -> None:
    Path("r.yml").write_text(BLOCK.format(align="{anchor: 2, source: learned, data: t.txt}"), "utf-8")
    for args in (("check", "r.yml"), ("merge", "r.yml", "out")):
        found = run(*args)
        assert found.exit_code not in (0, 1)
        assert "is one batch, of which none can be held out" in found.output
    assert not Path("out").exists()
