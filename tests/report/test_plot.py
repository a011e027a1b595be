"""Figures for papers: all of them, in every format, with text as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from symfuse.cli import main
from symfuse.errors import OptionError, OutputError
from symfuse.report.plot import COLUMN, plot

NAMES = {
    "distance-by-axis", "distance-by-layer", "distance-left", "barrier", "barrier-accuracy", "barrier-b-f1--b",
    "landscape", "rotation-qk", "rotation-v", "permutation-ffn-layer-0", "permutation-ffn-layer-1",
    "permutation-h-layer-0", "permutation-h-layer-1",
}  # fmt: skip


def test_all_figures_of_a_run(runs: Path, tmp_path: Path) -> None:
    written = plot([runs], tmp_path / "new", "svg")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {path.name for path in written}
    names = {path.stem for path in written}
    assert names >= NAMES
    assert {re.sub(r"-2$", "", name) for name in names} == NAMES  # of two alignments, two distances
    text = (tmp_path / "new" / "barrier.svg").read_text("utf-8")
    assert ">loss (nats)</text>" in text


@pytest.mark.parametrize(("form", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_formats_and_that_files_are_the_same_each_time(runs: Path, tmp_path: Path, form: str, magic: bytes) -> None:
    (first,) = [path for path in plot([runs / "barrier.json"], tmp_path / "1", form) if path.stem == "barrier"]
    again = [path for path in plot([runs / "barrier.json"], tmp_path / "2", form) if path.stem == "barrier"]
    assert first.read_bytes().startswith(magic)
    assert first.read_bytes() == again[0].read_bytes()
    if form == "png":
        with Image.open(first) as image:
            assert image.width == pytest.approx(COLUMN * 300, abs=2)
    if form == "pdf":
        assert b"/Type /Font" in first.read_bytes()


def test_the_verb(runs: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["plot", str(runs / "landscape.json"), "-o", str(tmp_path), "--format", "svg"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [str(tmp_path / "landscape.svg")]


def test_errors(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'eps': expected one of png, svg, pdf"):
        plot([runs], tmp_path, "eps")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"):
        plot([runs / "barrier.json"], tmp_path / "file", "svg")
