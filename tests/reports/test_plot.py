"""Figures for papers: all of them, in every format, with text as text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from reports.reading import broken
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
    inputs = [runs / "barrier.json", runs / "landscape.json"]
    written, again = (plot(inputs, tmp_path / name, form) for name in "12")
    first = next(path for path in written if path.stem == "barrier")
    assert first.read_bytes().startswith(magic)
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]
    if form == "png":
        with Image.open(first) as image:
            assert image.width == pytest.approx(COLUMN * 300, abs=2)
    if form == "pdf":
        assert b"/Type /Font" in first.read_bytes()


def test_the_verb(runs: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(runs / "landscape.json"), "-o", str(tmp_path), "--format", "svg"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [str(tmp_path / "landscape.svg")]


def test_errors(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'eps': expected one of png, svg, pdf"):
        plot([runs], tmp_path, "eps")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"):
        plot([runs / "barrier.json"], tmp_path / "file", "svg")


# -- what they show: of what these share with the page, the tests are there ---------------------------

Documents = dict[str, dict[str, Any]]
Values = list[dict[str, Any]]


def of(run: dict[str, Any]) -> Collected:
    return Collected({kind: [run] if kind == run["kind"] else [] for kind in SHAPES}, {})


def drawn(found: Collected, name: str) -> dict[str, Any]:
    return next(spec for one, spec in figures(found) if one == name)


def values(found: Collected, name: str) -> Values:
    data: Values = drawn(found, name)["data"]["values"]
    return data


@pytest.mark.parametrize("key", ["axis", "layer"])
def test_bars(key: str, documents: Documents) -> None:
    rows = documents["distance"][f"by_{key}"]
    bars = values(of(documents["distance"]), f"distance-by-{key}")
    assert [(bar["part"], bar["when"], bar["value"]) for bar in bars] == [
        (str(row[key]).replace("-1", "none"), when, row[when]) for row in rows for when in ("before", "after")
    ]


def test_shares_are_at_their_places(documents: Documents) -> None:
    tiles = values(of(documents["distance"]), "distance-left")
    rows = documents["distance"]["by_layer_and_axis"]
    assert {(tile["axis"], tile["layer"]): tile["share"] for tile in tiles} == {
        (row["axis"], "none" if row["layer"] == -1 else str(row["layer"])): row["share"] for row in rows
    }


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
        points = values(of(run), name)
        for curve in run["curves"]:
            line = [(one["at"], one["value"]) for one in points if one["alignment"] == curve["name"]]
            assert line == [(point["at"], value(point)) for point in curve["points"]]
            assert line[0][1] != line[-1][1]


def test_every_metric_of_any_curve_has_its_figure(documents: Documents) -> None:
    points = [{**point, "metrics": {"loss": point["at"]}} for point in documents["barrier"]["curves"][1]["points"]]
    found = of(broken(documents["barrier"], "curves", 1, "points", value=points))
    assert {name for name, _ in figures(found)} == {"barrier", "barrier-accuracy", "barrier-b-f1--b", "barrier-loss"}
    titles = [drawn(found, name)["encoding"]["y"]["title"] for name in ("barrier-loss", "barrier")]
    assert titles == ["metric loss", "loss (nats)"]
    first, second = (curve["name"] for curve in documents["barrier"]["curves"])
    line = [(one["alignment"], one["value"]) for one in values(found, "barrier-loss")]
    assert {value for name, value in line if name == first} == {None}
    assert [value for name, value in line if name == second] == [point["at"] for point in points]


def test_the_models_of_a_plane_are_named_below_it(documents: Documents) -> None:
    run = documents["landscape"]
    spec = drawn(of(run), "landscape")
    names = [f"{key}: {one['name']}" for key, one in zip("BC", run["models"][1:], strict=True)]
    assert spec["title"]["text"][1:] == names
    models = spec["layer"][-1]["data"]["values"]
    assert [(one["key"], one["x"], one["y"]) for one in models] == [
        (key, one["x"], one["y"]) for key, one in zip("ABC", run["models"], strict=True)
    ]


def test_permutations_and_rotations_are_at_their_places(runs: Path) -> None:
    found = collect([runs / "alignment-2.safetensors"])
    one = correspondence(next(iter(found.elements.values())))
    reordering = one.reorderings["ffn"][1]
    spec = drawn(found, "permutation-ffn-layer-1")
    assert spec["title"] == f"Neurons (ffn), layer 1: {reordering.moved} of 29 moved"
    assert spec["encoding"]["y"]["scale"]["reverse"]  # the first of the anchor is at the top
    places = {cell["y"]: cell["x"] for cell in spec["data"]["values"]}
    assert places == dict(enumerate(reordering.index.tolist()))
    turned = drawn(found, "rotation-qk")
    assert turned["title"] == "Queries and keys (qk)"
    tiles = {(tile["layer"], tile["at"]): tile["degrees"] for tile in turned["data"]["values"]}
    assert tiles == {(str(turn.layer), turn.at): turn.degrees for turn in one.turns["qk"]}


@pytest.mark.parametrize("name", ["landscape", "barrier"])
def test_the_look_of_the_page_is_the_look_of_the_figure(runs: Path, tmp_path: Path, name: str) -> None:
    plot([runs / f"{name}.json"], tmp_path, "svg")
    text = (tmp_path / f"{name}.svg").read_text("utf-8")
    assert 'width="237.6pt"' in text
    assert {"landscape": "#d55e00", "barrier": "#0072b2"}[name] in text  # of the page's style sheet
    assert "$" not in re.sub(r">[^<]*<", "", text)


def test_a_figure_that_cannot_be_written_leaves_none(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second fails while it is written beside its place, or while it gets its name; older ones are as they were."""
    folder = tmp_path / "figures"
    names = [path.name for path in plot([runs / "barrier.json", runs / "distance.json"], folder, "svg")]
    before = {name: (folder / name).read_bytes() for name in names}
    (folder / names[0]).unlink()
    before.pop(names[0])
    for step in ("write_bytes", "replace"):
        real, calls = getattr(Path, step), list[Path]()

        def fails(path: Path, *args: Any, real: Any = real, calls: list[Path] = calls) -> Any:
            calls.append(path)
            if len(calls) == 2:
                raise OSError("no space left")
            return real(path, *args)

        with monkeypatch.context() as patched:
            patched.setattr(Path, step, fails)
            with pytest.raises(OutputError, match="no space left"):
                plot([runs / "barrier.json", runs / "distance.json"], folder, "svg")
        assert len(calls) > 1
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
