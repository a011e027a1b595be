"""Reads a page back: its texts, its scripts, its tables and the specifications of its charts."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any


@dataclass
class Read:
    """A table of a page: numbers in full. best: (row, column) of what stands out."""

    title: str
    head: list[str] = field(default_factory=list)
    rows: list[list[str | float]] = field(default_factory=list)
    best: set[tuple[int, str]] = field(default_factory=set)

    def column(self, title: str) -> list[str | float]:
        assert self.head.count(title) == 1, self.head
        return [row[self.head.index(title)] for row in self.rows]


class Reader(HTMLParser):
    """headings: of the sections. texts: their paragraphs and what is below charts; alerts: those that stand out."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.alerts: list[str] = []
        self.tables: list[Read] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._title = ""
        self._value: str | None = None
        self._is_alert = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "wbr":  # it has no end
            return
        self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        elif tag == "h2":
            self.headings.append("")
        elif tag in ("p", "figcaption") and "section" in self.open:
            self.texts.append("")
            self._is_alert = attributes.get("role") == "alert"
            self.alerts += [""] * self._is_alert
        elif tag in ("h3", "summary"):
            self._title = ""
        elif tag == "table":
            self.tables.append(Read(self._title.removeprefix("Numbers: ")))
        elif tag == "th":
            self.tables[-1].head.append("")
        elif tag == "tr" and "tbody" in self.open:
            self.tables[-1].rows.append([])
        elif tag == "td":
            self.tables[-1].rows[-1].append("")
            self._value = attributes.get("data-value")
        elif tag == "strong":
            table = self.tables[-1]
            table.best.add((len(table.rows) - 1, table.head[len(table.rows[-1]) - 1]))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass
        if tag == "td" and self._value is not None:
            self.tables[-1].rows[-1][-1] = float(self._value)

    def handle_data(self, data: str) -> None:
        inner = self.open[-1] if self.open else ""
        if inner == "script":
            self.scripts[-1] += data
        elif inner == "h2":
            self.headings[-1] += data
        elif inner in ("h3", "summary"):
            self._title += data
        elif inner in ("p", "figcaption") and "section" in self.open:
            self.texts[-1] += data
            if self._is_alert:
                self.alerts[-1] += data
        elif inner == "th":
            self.tables[-1].head[-1] += data
        elif inner in ("td", "strong"):
            row = self.tables[-1].rows[-1]
            row[-1] = f"{row[-1]}{data}"

    @property
    def specs(self) -> list[dict[str, Any]]:
        """Of the charts, in order."""
        found: list[dict[str, Any]] = json.loads(self.scripts[0])
        return found

    def table(self, title: str) -> Read:
        """The first of that title."""
        return next(table for table in self.tables if table.title == title)


def broken(document: dict[str, Any], *path: str | int, value: Any) -> dict[str, Any]:
    """A copy with another value at a place."""
    made = copy.deepcopy(document)
    inner: Any = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made
