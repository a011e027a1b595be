"""Tables and the figure of what `connect.py` finds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def of_pairs(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """Mean ± standard error."""
    values = [scale * value for value in values]
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "–"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


@dataclass(frozen=True)
class Table:
    """The rows of one kind on one part of the data."""

    rows: Sequence[Row]

    def of(self, method: str) -> list[Row]:
        return [row for row in self.rows if row["method"] == method]

    def shares(self, method: str, name: str) -> list[float]:
        """What is left of the plain barrier, by pair."""
        plain = {row["pair"]: row[name] for row in self.of("plain")}
        return [row[name] / plain[row["pair"]] for row in self.of(method) if row["pair"] in plain]

    def line(self, method: str) -> str:
        rows = self.of(method)
        least = [min(accuracy for _, _, accuracy in row["curve"]) for row in rows]
        cells = [
            of_pairs([row["barrier"] for row in rows], 3),
            of_pairs(self.shares(method, "barrier"), 1, 100),
            of_pairs([row["barrier over mean"] for row in rows], 3),
            of_pairs(self.shares(method, "barrier over mean"), 1, 100),
            of_pairs([row["midpoint loss"] for row in rows], 3),
            of_pairs([row["midpoint accuracy"] for row in rows], 3),
            of_pairs(least, 3),
            of_pairs([row["cpu seconds"] for row in rows], 0),
        ]
        return f"| {method} | {len(rows)} | {' | '.join(cells)} |"

    def __str__(self) -> str:
        head = (
            "way", "pairs", "barrier", "% of plain", "over the mean", "% of plain", "midpoint loss",
            "midpoint accuracy", "least accuracy", "seconds",
        )  # fmt: skip
        ways = dict.fromkeys(row["method"] for row in self.rows)
        return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *map(self.line, ways)])

    def ends(self) -> str:
        rows = self.of("plain")
        losses, accuracies = ([x for row in rows for x in row[name]] for name in ("end losses", "end accuracies"))
        return f"Ends: loss {of_pairs(losses, 3)}, accuracy {of_pairs(accuracies, 3)}."


def simplices(rows: Sequence[Row]) -> str:
    head = ("kind", "way", "barrier", "over the mean", "loss at the center", "accuracy there", "mean of the corners")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        corners = statistics.fmean(row["end losses"])
        cells = [row["barrier"], row["barrier over mean"], *row["center"], corners]
        lines.append(f"| {row['kind']} | {row['method']} | {' | '.join(f'{x:.3f}' for x in cells)} |")
    return "\n".join(lines)


def report(rows: Sequence[Row], kinds: Iterable[str], methods: Sequence[str]) -> str:
    """All tables, in the order of the kinds and methods."""
    rows = sorted(rows, key=lambda row: methods.index(row["method"]))
    paths, parts = [row for row in rows if "curve" in row], []
    for kind in kinds:
        table = Table([row for row in paths if row["kind"] == kind and row["split"] == "test"])
        if table.rows:
            parts.append(f"### {kind}\n\n{table.ends()}\n\n{table}")
    if three := [row for row in rows if "points" in row]:
        parts.append(f"### Three models\n\n{simplices(three)}")
    for kind in kinds:
        tried = Table([row for row in paths if row["kind"] == kind and row["split"] == "match"])
        if tried.rows:
            parts.append(f'### Tried without labels: {kind}, pair {tried.rows[0]["pair"]}, on "match"\n\n{tried}')
    return "\n\n".join(parts)


# Okabe and Ito's colours, and a dash for each way.
DRAWN = {
    "plain": ("#6b7280", "-"),
    "activation matching": ("#b88a00", ":"),
    "weight matching": ("#0072b2", "--"),
    "label-free": ("#009e73", "-."),
    "learned permutations": ("#cc79a7", (0, (5, 1))),
    "learned orthogonal": ("#d55e00", (0, (3, 1, 1, 1))),
    "learned orthogonal, no labels": ("#56b4e9", (0, (4, 1))),
    "learned dual": ("#000000", (0, (1, 1))),
}


def draw(rows: Sequence[Row], kinds: Sequence[str], file: Path) -> None:
    """Loss and accuracy along the paths, means over pairs at the places where all pairs were measured."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    kinds = [kind for kind in kinds if any(row["kind"] == kind and "curve" in row for row in rows)]
    style: Any = {"font.size": 7, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with rc_context(style | {"svg.fonttype": "none", "svg.hashsalt": "symfuse", "lines.linewidth": 1.1}):
        figure = Figure(figsize=(2.2 * len(kinds), 3.8), layout="constrained")
        axes = figure.subplots(2, len(kinds), sharex=True, squeeze=False)
        for column, kind in enumerate(kinds):
            for method, (colour, dash) in DRAWN.items():
                found = [r for r in rows if (r["kind"], r["method"], r["split"]) == (kind, method, "test")]
                for line, quantity in enumerate(("loss", "accuracy")) if found else ():
                    curves = [{point[0]: point[1 + line] for point in row["curve"]} for row in found]
                    common = sorted(set.intersection(*(set(curve) for curve in curves)))
                    values = [statistics.fmean(curve[at] for curve in curves) for at in common]
                    axes[line][column].plot(common, values, color=colour, linestyle=dash, label=method)
                    axes[line][0].set_ylabel(quantity)
            axes[0][column].set_title(kind)
            axes[1][column].set_xlabel("λ")
        handles, names = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3)
        figure.savefig(file, metadata={"Date": None})
