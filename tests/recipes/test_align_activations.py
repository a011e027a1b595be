"""Recipes whose models are aligned by what they do on data, instead of by their weights."""

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
from symfuse.recipes import parse_recipe

BLOCK = "merge_method: linear\nmodels: [{{model: a}}, {{model: b}}]\nparameters: {{weight: 0.5}}\nalign: {align}\n"
GOOD = "{anchor: 2, axes: [attention, ffn], source: activations, data: t.txt, limit: 3}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    checkpoint = CASES["masked"][1]()
    checkpoint.save("b")
    plant = random_alignment(symfuse.declare(checkpoint), 3, axes=("qk", "v", "ffn"))
    plant(checkpoint).save("a")
    Path("t.txt").write_text("abc def ghi\njkl mno\npqr abd tgh\nabc\n", "utf-8")
    Path("r.yml").write_text(BLOCK.format(align=GOOD), "utf-8")
    return tmp_path


def test_a_recipe_from_activations_is_that_of_python(place: Path) -> None:
    assert "from activations on t.txt" in done("check", "r.yml").stdout
    done("merge", "r.yml", "out")
    data = symfuse.task("masked-lm", "t.txt", "b", limit=3)
    alignment = symfuse.match("a", to="b", axes=("attention", "ffn"), data=data)
    expected = symfuse.merge([alignment(symfuse.open("a")), symfuse.open("b")], weights=[0.5, 0.5])
    merged = symfuse.open("out")
    for name in expected:
        torch.testing.assert_close(merged[name], expected[name], rtol=1e-6, atol=1e-7)
    run_ = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    assert [one["options"]["scaling"] for one in run_["alignments"]] == [False]
    assert alignment.elements


TOGETHER = "line 4: align: `source: activations` and `source: learned` need `data: FILE`"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("{source: activations}", TOGETHER),
        ("{data: t.txt}", TOGETHER),
        ("{source: gradients}", "line 4: align.source"),
        ("{limit: 3}", "line 4: align.limit: this limits the rows of `data`"),
        ("{source: activations, data: t.txt, limit: 0}", "line 4: align.limit"),
        (
            "{source: activations, data: t.txt, one_pass: true}",
            "line 4: align.one_pass: only for `source: weights`",
        ),
    ],
)
def test_blocks_that_make_no_sense(block: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_recipe(BLOCK.format(align=block))


def test_data_that_are_not_there_are_said_before_the_merge(place: Path) -> None:
    Path("t.txt").unlink()
    for args in (("check", "r.yml"), ("merge", "r.yml", "out")):
        found = run(*args)
        assert found.exit_code != 0
        assert "t.txt" in found.output
    assert not Path("out").exists()
