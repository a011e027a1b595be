"""Figures for papers: all of them, in every format, with text as text."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from report.reading import broken
from symfuse.cli import main
from symfuse.errors import OptionError, OutputError
from symfuse.reports.collect import Collected, collect
from symfuse.reports.correspondence import correspondence
from symfuse.reports.plot import COLUMN, figures, plot
from symfuse.reports.shapes import SHAPES

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


# -- what they show --------------------------------------------------------------------------------

Documents = dict[str, dict[str, Any]]


def of(run: dict[str, Any]) -> Collected:
    return Collected({kind: [run] if kind == run["kind"] else [] for kind in SHAPES}, {})


def drawn(found: Collected, name: str) -> Axes:
    """The axes of a figure, with a way to look at them."""
    draw = next(draw for one, _, draw in figures(found) if one == name)
    axes: Axes = Figure().add_subplot()
    draw(axes)
    return axes


def heights(ax: Axes) -> list[list[float]]:
    return [[bar.get_height() for bar in container] for container in ax.containers]  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["axis", "layer"])
def test_bars(key: str, documents: Documents) -> None:
    rows = documents["distance"][f"by_{key}"]
    ax = drawn(of(documents["distance"]), f"distance-by-{key}")
    assert heights(ax) == [[row["before"] for row in rows], [row["after"] for row in rows]]
    assert [container.get_label() for container in ax.containers] == ["before", "after"]
    assert [text.get_text() for text in ax.get_xticklabels()] == [str(row[key]).replace("-1", "none") for row in rows]


def test_shares_are_at_their_places(documents: Documents) -> None:
    ax = drawn(of(documents["distance"]), "distance-left")
    grid = ax.images[0].get_array()
    layers = [text.get_text() for text in ax.get_xticklabels()]
    axes = [text.get_text() for text in ax.get_yticklabels()]
    rows = documents["distance"]["by_layer_and_axis"]
    for row in rows:
        place = axes.index(row["axis"]), layers.index("none" if row["layer"] == -1 else str(row["layer"]))
        assert grid[place] == row["share"]
    assert np.isfinite(np.ma.filled(grid, np.nan)).sum() == len(rows)


@pytest.mark.parametrize("empty", ["by_axis", "by_layer", "by_layer_and_axis"])
def test_figures_without_rows_are_left_out(empty: str, documents: Documents, tmp_path: Path) -> None:
    (tmp_path / "distance.json").write_text(json.dumps(documents["distance"] | {empty: []}))
    assert len(plot([tmp_path], tmp_path / "figures", "svg")) == 2


def test_curves_run_from_the_anchor_to_the_source(documents: Documents) -> None:
    run = documents["barrier"]
    for name, value in (
        ("barrier", lambda point: point["loss"]),
        ("barrier-accuracy", lambda point: point["metrics"]["accuracy"]),
    ):
        lines = {line.get_label(): line for line in drawn(of(run), name).lines}
        for curve in run["curves"]:
            line = lines[curve["name"]]
            assert list(line.get_xdata()) == [point["at"] for point in curve["points"]]
            assert list(line.get_ydata()) == [value(point) for point in curve["points"]]
            assert line.get_ydata()[0] != line.get_ydata()[-1]


def test_every_metric_of_any_curve_has_its_figure(documents: Documents) -> None:
    points = [{**point, "metrics": {"loss": point["at"]}} for point in documents["barrier"]["curves"][1]["points"]]
    found = of(broken(documents["barrier"], "curves", 1, "points", value=points))
    assert {name for name, _, _ in figures(found)} == {"barrier", "barrier-accuracy", "barrier-b-f1--b", "barrier-loss"}
    ax = drawn(found, "barrier-loss")
    assert (ax.get_ylabel(), drawn(found, "barrier").get_ylabel()) == ("metric loss", "loss (nats)")
    first, second = ax.lines
    assert np.isnan(first.get_ydata()).all()
    assert list(second.get_ydata()) == [point["at"] for point in points]


def test_the_plane_is_not_turned(documents: Documents) -> None:
    run = copy.deepcopy(documents["landscape"])
    run["ys"], run["loss"] = run["ys"][:5], run["loss"][:5]
    run["metrics"] = {}
    ax = drawn(of(run), "landscape")
    mesh = ax.collections[0]
    assert np.array_equal(np.ma.filled(mesh.get_array(), np.nan), np.array(run["loss"]))
    corners = mesh.get_coordinates()  # type: ignore[attr-defined]
    assert np.allclose(corners[0, :-1, 0] + corners[0, 1:, 0], 2 * np.array(run["xs"]))
    assert np.allclose(corners[:-1, 0, 1] + corners[1:, 0, 1], 2 * np.array(run["ys"]))
    marks = [line.get_xydata()[0].tolist() for line in ax.lines]
    assert marks == [[model["x"], model["y"]] for model in run["models"]]


def test_lines_are_where_their_losses_are(documents: Documents) -> None:
    run = copy.deepcopy(documents["landscape"])
    run["loss"] = [[x + 0.5 * y for x in run["xs"]] for y in run["ys"]]
    run["metrics"] = {}
    lines = drawn(of(run), "landscape").collections[1]
    found = 0
    for level, path in zip(lines.levels, lines.get_paths(), strict=True):  # type: ignore[attr-defined]
        assert np.allclose(path.vertices[:, 0] + 0.5 * path.vertices[:, 1], level)
        found += len(path.vertices)
    assert found > 20


def test_permutations_and_rotations_are_at_their_places(runs: Path) -> None:
    found = collect([runs / "alignment-2.safetensors"])
    one = correspondence(next(iter(found.elements.values())))
    index = one.reorderings["ffn"][1].index
    ax = drawn(found, "permutation-ffn-layer-1")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("neuron of the source", "neuron of the anchor")
    image = ax.images[0]
    assert np.array_equal(np.argwhere(image.get_array())[:, 1], index.numpy())
    assert list(image.get_extent()) == [0, 29, 29, 0]  # the first of the anchor is at the top
    assert not torch.equal(index[index], torch.arange(len(index)))
    ax = drawn(found, "rotation-qk")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "layer")
    for turn in one.turns["qk"]:
        assert ax.images[0].get_array()[turn.layer, int(turn.at)] == turn.degrees
