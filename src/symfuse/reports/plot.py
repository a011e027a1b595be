"""Figures for papers: the charts of the page, one column wide, exported by vl-convert with text kept as text."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from symfuse.errors import OptionError
from symfuse.io.partial import together
from symfuse.io.target import check_file, write_file
from symfuse.reports import charts
from symfuse.reports.charts import Spec
from symfuse.reports.collect import Collected, collect
from symfuse.reports.content import axis_title, short
from symfuse.reports.correspondence import Correspondence, correspondence
from symfuse.reports.landscape import KEYS, landscape_chart
from symfuse.reports.page import asset, converter

FORMATS = ("png", "svg", "pdf")
_MARK = b"symfuse"  # in every figure
COLUMN = 3.3  # inches: one column of the usual two-column papers
_WIDTH = 374  # pixels of the page that make one column: letters of 11 pixels are printed with 7 points
_POINTS = 72 * COLUMN / _WIDTH


def plot(runs: Sequence[str | Path], folder: Path, form: str = "pdf") -> list[Path]:
    """Draw every figure for which runs (see `collect`) have data into a folder, as png (300 dpi), svg or pdf, and
    return the paths. All are written, or none is.

    Raises CheckpointError for runs that cannot be read, OptionError for another format or if vl-convert is not
    installed, OutputError if the folder cannot be written.
    """
    if form not in FORMATS:
        raise OptionError(f"format {form!r}: expected one of {', '.join(FORMATS)}")
    drawn: dict[Path, bytes] = {}
    for name, spec in figures(collect(runs)):
        drawn[folder / f"{_free(name, drawn)}.{form}"] = _drawn(spec, form)
    for path in drawn:  # before the first is written
        check_file(path, _MARK)
    with together():
        for path, data in drawn.items():
            write_file(path, data, "the figure", mark=_MARK)
    return [*drawn]


def figures(collected: Collected) -> Iterator[tuple[str, Spec]]:
    """Names and Vega-Lite specifications."""
    for run in [
        *(one["distance"] for one in collected.alignments if one.get("distance")),
        *collected.documents["distance"],
    ]:
        for key in ("axis", "layer"):
            if rows := run[f"by_{key}"]:
                yield f"distance-by-{key}", charts.distance_bars(rows, key)
        if rows := [row for row in run["by_layer_and_axis"] if row["before"]]:
            yield "distance-left", charts.share_map(rows)
    for run in collected.documents["barrier"]:
        yield "barrier", charts.curve_chart(run)
        for metric in charts.curve_metrics(run):
            yield f"barrier-{_safe(metric)}", charts.curve_chart(run, metric)
    for run in collected.documents["landscape"]:
        names = [f"{key}: {short(one['name'], 48)}" for key, one in zip(KEYS, run["models"], strict=False)]
        yield "landscape", landscape_chart(run) | {"title": {"text": names, "orient": "bottom"}}
    for path, alignment in collected.elements.items():
        yield from _correspondence(correspondence(alignment, path.stem))


def _correspondence(one: Correspondence) -> Iterator[tuple[str, Spec]]:
    for axis, turns in one.turns.items():
        if len(turns) > 1:  # a single number is no picture
            yield f"rotation-{axis}", charts.turn_chart(turns) | {"title": axis_title(axis)}
    for axis, result in one.reorderings.items():
        for reordering in result:
            title = f"{axis_title(axis)}, {reordering.place}: {reordering.moved:,} of {reordering.size:,} moved"
            yield (
                f"permutation-{axis}-{_safe(reordering.place)}",
                charts.reordering_chart([reordering]) | {"title": title},
            )


def _free(name: str, written: Collection[Path]) -> str:
    """The name, or the next unused one with a number, since several runs may have the same figures."""
    used = {path.stem for path in written}
    names = (name if i == 1 else f"{name}-{i}" for i in range(1, len(used) + 2))
    return next(one for one in names if one not in used)


def _safe(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text).strip("-") or "x"


def _drawn(spec: Spec, form: str) -> bytes:
    """The bytes of a figure, reproducible, with the mark in its metadata or a comment."""
    convert = converter("a figure")
    spec = spec | {"width": _WIDTH}
    if "usermeta" in spec:
        spec["height"] = min(560, round((_WIDTH - 60) * spec["usermeta"]["aspect"]))  # as on the page
    unit = "pt" if form == "svg" else ""
    size = partial(re.sub, r'( width| height)="([\d.]+)"', lambda m: f'{m[1]}="{float(m[2]) * _POINTS:.6g}{unit}"')
    ids: dict[str, str] = {}  # vl-convert counts on from one figure to the next
    svg = re.sub(
        r'(id="|url\(#)(clip|gradient_)(\d+)',
        lambda m: m[1] + m[2] + ids.setdefault(m[2] + m[3], str(len(ids))),
        size(convert.vegalite_to_svg(spec, config=_theme()), count=2),
    )
    if form == "svg":
        return f'<?xml version="1.0" encoding="utf-8"?>\n<!-- {_MARK.decode()} -->\n{svg}\n'.encode()
    if form == "pdf":
        names = re.compile(rb"(?: +/[a-z]+\d+ \d+ 0 R\n)+")  # of resources, in arbitrary order
        made = names.sub(lambda result: b"".join(sorted(result[0].splitlines(True))), bytes(convert.svg_to_pdf(svg)))
        return made + b"%% %s\n" % _MARK
    data, text = bytes(convert.svg_to_png(svg, ppi=300)), b"tEXtSoftware\0" + _MARK
    chunk = struct.pack(f">I{len(text)}sI", len(text) - 4, text, zlib.crc32(text))
    return data[:-12] + chunk + data[-12:]  # before the last chunk, which is empty


def _theme() -> dict[str, Any]:
    """The look of the page's charts in its light colours, on white."""
    colours = dict(re.findall(r"--([\w-]+): ([^;]+);", asset("page.css").partition("@media")[0]))
    filled = re.sub(r'"\$([\w-]+)"', lambda name: json.dumps(_colour(colours[name[1]])), asset("theme.json"))
    one_font = filled.replace('"fontWeight": 600', '"fontWeight": "normal"')  # a PDF lists fonts in arbitrary order
    theme: dict[str, Any] = json.loads(one_font)
    return theme | {"background": "white"}


def _colour(value: str) -> str | list[str]:
    """A colour, or a list of several."""
    return value.split() if " " in value else value
