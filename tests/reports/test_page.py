"""The page as text: complete, safe, small, and the same numbers as the runs."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reports.reading import Reader
from symfuse.cli import main
from symfuse.errors import OptionError, OutputError
from symfuse.reports.charts import distance_bars, share_map
from symfuse.reports.content import Table, short, tiny, write
from symfuse.reports.landscape import contour_lines, labelled, levels
from symfuse.reports.page import _library, page, write_page

SECTIONS = [
    "What was done", "What was matched, and how exactly", "Distances, before and after", "Along the path: barriers",
    "The landscape", "Correspondences", "The models' metrics", "Time and memory", "Inputs and versions",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(runs: Path) -> str:
    return page([runs])


@pytest.fixture(scope="module")
def reader(text: str) -> Reader:
    return Reader(text)


def test_all_sections_in_order_and_charts_with_texts(reader: Reader, text: str) -> None:
    assert reader.headings == SECTIONS
    figures = [attributes for tag, attributes in reader.tags if tag == "figure"]
    ids = {attributes.get("id") for _, attributes in reader.tags}
    assert len(figures) == len(json.loads(reader.scripts[0])) > 10
    for figure in figures:
        assert {figure["aria-labelledby"], figure["aria-describedby"]} <= ids
    assert len(text.encode()) < 5 * 2**20


def test_nothing_is_loaded_and_only_known_scripts_run(reader: Reader) -> None:
    for tag, attributes in reader.tags:
        assert tag not in ("img", "iframe", "object", "embed", "form", "base")
        loaded = [attributes[key] for key in ("src", "href") if key in attributes]
        assert all(link == "data:," or str(link).startswith("#") for link in loaded), loaded
        assert not any(name.startswith("on") for name in attributes)
    (policy,) = (a["content"] for t, a in reader.tags if t == "meta" and a.get("http-equiv"))
    data, *scripts = reader.scripts
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']+)'", str(policy)) == hashes
    assert str(policy).startswith("default-src 'none'; script-src 'sha256-")
    assert len(scripts) == 2
    assert json.loads(data)


def test_names_cannot_break_out(reader: Reader, text: str, documents: dict[str, dict[str, Any]]) -> None:
    assert "alert(1)</script>" not in text
    assert "<b>f1" not in text
    assert text.count("<script") == text.count("</script>") == 3
    assert "&lt;/<wbr>script&gt;" in text
    name = documents["barrier"]["anchor"]
    assert "</script>" in name
    curves = [row.get("alignment") for spec in json.loads(reader.scripts[0]) for row in spec["data"]["values"]]
    assert name in curves


def test_sections_without_data_are_left_out(runs: Path) -> None:
    assert Reader(page([runs / "barrier.json"])).headings == ["What was done", SECTIONS[3], SECTIONS[8]]
    assert Reader(page([runs / "alignment-1.safetensors"])).headings == [SECTIONS[5], SECTIONS[8]]


def test_the_tables_hold_the_numbers_in_full(text: str, documents: dict[str, dict[str, Any]]) -> None:
    for curve in documents["barrier"]["curves"]:
        for key in ("barrier", "barrier_over_mean", "distance"):
            assert f'data-value="{curve[key]!r}"' in text
    for row in documents["alignment"]["distance"]["by_tensor"]:
        assert f'data-value="{row["after"]!r}"' in text
    for digest in (documents["alignment"]["source"]["sha256"], documents["evaluation"]["task"]["sha256"]):
        assert digest in text
    assert "3·10⁻¹⁵" in text
    assert ">1.2<" in text  # seconds


def values(spec: Any) -> Iterator[Any]:
    if isinstance(spec, dict):
        for value in spec.values():
            yield from values(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from values(value)
    else:
        yield spec


def test_numbers_that_are_none_do_not_break_the_page(tmp_path: Path, documents: dict[str, dict[str, Any]]) -> None:
    plane = json.loads(json.dumps(documents["landscape"]))
    plane["loss"][0][0] = math.nan
    plane["loss"][1][0] = math.inf
    (tmp_path / "landscape.json").write_text(json.dumps(plane))
    found = json.loads(Reader(page([tmp_path])).scripts[0])
    assert len(found[0]["data"]["values"]) == 9 * 9 - 2
    row = {"axis": "v", "layer": 0, "before": math.inf, "after": math.nan, "share": math.nan}
    for spec in (distance_bars([row], "axis"), share_map([row])):
        assert all(math.isfinite(v) for v in values(spec) if isinstance(v, float))


def colours(spec: Any, key: str = "") -> Iterator[str]:
    """Whatever in a specification, with its layers but without its data, says how something is coloured."""
    if isinstance(spec, dict):
        for name, part in spec.items():
            if name != "data":
                # What an encoding gives to a mark is below `value`, beside `condition` or in it.
                yield from colours(part, key if name in ("value", "condition") else name)
    elif isinstance(spec, list):
        for part in spec:
            yield from colours(part, key)
    elif isinstance(spec, str) and (spec.startswith(("#", "rgb", "hsl")) or key in ("color", "fill", "stroke")):
        yield spec
    elif key == "scheme":
        yield str(spec)


@pytest.mark.parametrize(
    "part",
    [
        {"mark": {"type": "line", "color": "red"}},
        {"encoding": {"color": {"value": "red"}}},
        {"encoding": {"stroke": {"condition": {"param": "shown", "value": "red"}}}},
        {"encoding": {"color": {"scale": {"range": ["#ff0000"]}}}},
        {"encoding": {"color": {"scale": {"scheme": "blues"}}}},
    ],
)
def test_colours_are_found(part: dict[str, Any]) -> None:
    assert len(list(colours({"data": {"values": [{"color": "red"}]}, "layer": [{"layer": [part]}]}))) == 1


def test_specs_have_no_colours_and_no_names_in_expressions(reader: Reader) -> None:
    specs = reader.specs
    assert any("layer" in spec for spec in specs)
    assert list(colours(specs)) == []
    assert not re.search(r"(filter|calculate|expr|test)\"[^}]*alert", reader.scripts[0])


def test_without_the_extra(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    _library.cache_clear()
    with pytest.raises(OptionError, match=r"pip install 'symfuse\[report\]'"):
        page([runs])


# -- what is written -------------------------------------------------------------------------------


def test_writing_numbers() -> None:
    cells = [(None, "–"), (math.nan, "–"), (0.25, "0.25"), (25417.7, "25,418"), (1e-9, "1e-09"), ("<", "<")]
    assert [write(cell) for cell, _ in cells] == [text for _, text in cells]
    assert [tiny(x) for x in (8e-15, 1.26e-7, 0.0, 3.0)] == ["8·10⁻¹⁵", "1·10⁻⁷", "0", "3·10⁰"]
    assert [short(n) for n in ("a", "/x/y/models/a/", "org/name")] == ["a", "models/a", "org/name"]
    assert len(short("x" * 100, 32)) == 33


def test_the_best_number_of_a_column_stands_out() -> None:
    table = Table(
        "t", {"model": "", "loss": ".2f", "f1": ".2f"}, [["a", 2.0, 0.5], ["b", 1.0, 0.5], ["c", math.nan, None]]
    )
    assert table.winners() == set()
    best = Table(table.title, table.columns, table.rows, {"loss": "min", "f1": "max"})
    assert best.winners() == {(1, 1)}  # where all are equal none is best


# -- contour lines ---------------------------------------------------------------------------------


def plane(loss: Any, steps: int = 41) -> dict[str, Any]:
    ticks = [-2 + 4 * i / (steps - 1) for i in range(steps)]
    grid = [[loss(x, y) for x in ticks] for y in ticks]
    return {"xs": ticks, "ys": ticks, "loss": grid, "models": [{"name": "a", "x": 0.0, "y": 0.0, "loss": loss(0, 0)}]}


def test_contours_of_a_bowl_are_ellipses() -> None:
    def bowl(x: float, y: float) -> float:
        return 1 + x * x + 4 * (y - 0.5) * (y - 0.5)

    run = plane(bowl)
    lines = contour_lines(run)
    drawn = sorted({line.level for line in lines})
    assert len(drawn) > 4
    for line in lines:
        for x, y in line.points:
            assert bowl(x, y) == pytest.approx(line.level, abs=0.02)
        assert line.is_low == (line.level in drawn[: (len(drawn) + 1) // 2])
    spots = [line.middle for line in labelled(lines, run)]
    assert spots
    assert all(max(abs(x), abs(y)) > 0.07 * 4 for x, y in spots)


def test_levels() -> None:
    assert levels([]) == levels([2.0, 2.0]) == []
    assert levels([0.0, 10.0]) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    close = levels([0.58812, 0.58834])
    assert len(close) == 9
    assert 0.58812 < min(close) < max(close) < 0.58834
    wide = levels([0.1, 100.0])
    ratios = [b / a for a, b in pairwise(wide)]
    assert max(ratios) / min(ratios) < 1.2
    assert contour_lines(plane(lambda *_: math.nan)) == []


# -- the verb --------------------------------------------------------------------------------------


def test_report_writes_the_page(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "page.html"
    result = CliRunner().invoke(main, ["report", str(runs), "-o", str(target), "--title", "<Two> & one", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"output": str(target), "bytes": target.stat().st_size}
    assert "<title>&lt;Two&gt; &amp; one</title>" in target.read_text("utf-8")
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]


def test_report_says_what_is_wrong(tmp_path: Path) -> None:
    result = CliRunner(catch_exceptions=False).invoke(
        main, ["report", str(tmp_path), "-o", str(tmp_path / "page.html")]
    )
    assert result.exit_code == 3
    assert "no run of symfuse in this folder" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written"):
        write_page([runs / "barrier.json"], tmp_path / "file" / "page.html")
