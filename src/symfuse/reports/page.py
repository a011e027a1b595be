"""One HTML file that shows runs, without network or other files.

Data are escaped in HTML and in the JSON of the charts. In addition, the page's Content-Security-Policy runs only its
own two scripts (by their sha256) and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from symfuse.errors import OptionError, printable
from symfuse.io.target import write_text
from symfuse.reports.collect import collect
from symfuse.reports.content import Alert, Chart, Part, Section, Table
from symfuse.reports.origins import pair
from symfuse.reports.sections import sections

_LIBRARY = "window.vegaEmbed = vegaEmbed;"


def page(runs: Sequence[str | Path], title: str | None = None) -> str:
    """The page of runs (see `collect`), as HTML. title: by default the subject of the first run.

    Raises CheckpointError for runs that cannot be read, OptionError if vl-convert is not installed.
    """
    collected = collect(runs)
    scripts = {"library": _library(), "script": _filled(asset("page.js"), {"theme": asset("theme.json").strip()})}
    if title is None:
        named = [*collected.alignments, *collected.documents["barrier"], *collected.documents["distance"]]
        merged = [run["merged"] for run in collected.documents["merge"]]
        title = merged[0] if merged else pair(named[0]) if named else Path(runs[0]).resolve().stem
    made = sections(collected)
    charts = [part.spec for section in made for part in section.parts if isinstance(part, Chart)]
    numbers = iter(range(len(charts)))
    return _filled(
        asset("page.html"),
        {
            "title": escape(title),
            "heading": _words(title),
            "policy": " ".join(f"'sha256-{_sha256(script)}'" for script in scripts.values()),
            "style": asset("page.css"),
            "contents": "".join(f'<li><a href="#part-{i}">{escape(s.title)}</a></li>' for i, s in enumerate(made) if i),
            "sections": "\n".join(_section(i, section, numbers) for i, section in enumerate(made)),
            "charts": _json(charts),
            **scripts,
        },
    )


def write_page(runs: Sequence[str | Path], target: Path, title: str | None = None) -> Path:
    """Write the page atomically; OutputError if that fails."""
    write_text(target, page(runs, title), "the page", mark='<p class="made">symfuse report</p>')
    return target


@cache  # takes a second
def _library() -> str:
    return str(converter("the page").javascript_bundle(_LIBRARY))


def converter(what: str) -> Any:
    """vl-convert, which `what` needs; OptionError if it is not installed."""
    try:
        import vl_convert
    except ImportError as error:
        raise OptionError(f"vl-convert-python is missing: {what} needs it; pip install 'symfuse[report]'") from error
    return vl_convert


@cache
def asset(name: str) -> str:
    return resources.files("symfuse.reports").joinpath("assets", name).read_text("utf-8")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Replace each {{name}} by its value, in one pass, so that values are not filled in again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda result: values[result[1]], template)


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(data: Any) -> str:
    """JSON for a <script>, without tags, comments or entities."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def escape(text: str) -> str:
    return html.escape(printable(text))


def _words(text: str) -> str:
    """Escaped text, with line breaks allowed after _ and / in names."""
    return re.sub(r"[_/](?=\w)", r"\g<0><wbr>", escape(text))


def _section(number: int, section: Section, charts: Any) -> str:
    parts = [_part(part, charts) for part in section.parts]
    heading = f"<h2>{escape(section.title)}</h2>"
    return f'<section id="part-{number}">{heading}<div class="parts">{"".join(parts)}</div></section>'


def _part(part: Part, charts: Any) -> str:
    if isinstance(part, str):
        return f"<p>{_words(part)}</p>"
    if isinstance(part, Alert):
        return f'<p class="alert" role="alert">{_words(part.text)}</p>'
    if isinstance(part, Table):
        if len(part.rows) > 24:
            return f'<div class="numbers">{_folded(part)}</div>'
        return f'<div class="numbers"><h3>{_words(part.title)}</h3>{_copied(part)}</div>'
    name = f"chart-{next(charts)}"
    return (
        f'<figure class="{part.size}" aria-labelledby="{name}-title" aria-describedby="{name}-text">'
        f'<h3 id="{name}-title">{_words(part.title)}</h3>'
        f'<div class="chart" id="{name}"></div>'
        f'<figcaption id="{name}-text">{_words(part.text)}</figcaption>{_folded(part.numbers)}</figure>'
    )


def _folded(table: Table) -> str:
    return f"<details><summary>Numbers: {escape(table.title)}</summary>{_copied(table)}</details>"


def _copied(table: Table) -> str:
    """The table with a button that copies it. Cells have the full number as data."""
    numeric = [form != "" for form in table.columns.values()]
    kinds = [' class="number"' if number else "" for number in numeric]
    head = "".join(f'<th scope="col"{k}>{escape(t)}</th>' for t, k in zip(table.columns, kinds, strict=True))
    best = table.winners()
    rows = []
    for i, row in enumerate(table.rows):
        cells = []
        for j, (cell, text) in enumerate(zip(row, table.written(row), strict=True)):
            full = f' data-value="{cell!r}"' if isinstance(cell, float) else ""
            words = f"<strong>{_words(text)}</strong>" if (i, j) in best else _words(text)
            kind = ' class="long"' if len(text) > 24 else kinds[j]
            cells.append(f"<td{kind}{full}>{words}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<div class="table"><button type="button" class="copy">Copy</button><div class="scroll" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )
