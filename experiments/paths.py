"""The straight path between two models as rows, tables and curves of studies, by way of matching."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drawing import COLOURS, DASHES
from study import Row, better, mean_error, table
from ways import Apart, Way, outcome_of

from symfuse.evaluation import Curve, barrier

NOTHING = 0.01  # a barrier up to this share of the plain one is called none
HEAD = (
    "way", "pairs", "barrier", "% of plain", "over the mean", "% of plain", "midpoint loss", "midpoint accuracy",
    "least accuracy", "seconds",
)  # fmt: skip
BY_SEED = ("seeds of learning", "% of plain: spread by seed", "largest")  # where a way has several seeds of learning


def measured(apart: Apart, name: str, way: Way, split: Any = "test") -> Row:
    """The path between two models as a way moves them."""
    outcome = outcome_of(apart, name, way)
    source, anchor = outcome.models
    path = barrier({"path": (source, anchor)}, apart.family.task(split), build=apart.family.build).curves["path"]
    return {**of_curve(path), **outcome.about}


def of_curve(curve: Curve) -> Row:
    ends, middle = (curve.points[0], curve.points[-1]), next(p for p in curve.points if p.at == 0.5)
    return {
        "barrier": curve.barrier,
        "barrier over mean": curve.barrier_over_mean,
        "peak": curve.peak.at,
        "distance": curve.distance,
        "end losses": [p.score.loss for p in ends],
        "end accuracies": [p.score.metrics["accuracy"] for p in ends],
        "midpoint loss": middle.score.loss,
        "midpoint accuracy": middle.score.metrics["accuracy"],
        "curve": [[p.at, p.score.loss, p.score.metrics["accuracy"]] for p in curve.points],
    }


@dataclass(frozen=True)
class Paths:
    """Rows of pairs of one family on one part of the data. papers: by column of a paper its barriers by way."""

    rows: Sequence[Row]
    papers: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(
        cls, rows: Sequence[Row], papers: Mapping[str, Mapping[str, float]] | None = None, **conditions: Any
    ) -> Paths:
        kept = [row for row in rows if all(row.get(key) == value for key, value in conditions.items())]
        return cls(kept, papers or {})

    def way(self, method: str) -> list[Row]:
        return [row for row in self.rows if row["method"] == method]

    def shares(self, method: str, name: str = "barrier") -> list[float]:
        """What is left of the plain barrier, by pair that has one."""
        return list(self.by_pair(method, name).values())

    def by_pair(self, method: str, name: str = "barrier") -> dict[tuple[Any, Any], float]:
        """The mean over the seeds of learning."""
        return {pair: statistics.fmean(shares) for pair, shares in self.by_seed(method, name).items()}

    def by_seed(self, method: str, name: str = "barrier") -> dict[tuple[Any, Any], list[float]]:
        """What is left of the plain barrier by pair, one share for each seed of learning."""
        plain = {(row["source"], row["anchor"]): row[name] for row in self.way("plain")}
        return {
            pair: [row[name] / plain[pair] for row in rows]
            for pair, rows in self.rows_by_pair(method).items()
            if plain.get(pair)
        }

    def rows_by_pair(self, method: str) -> dict[tuple[Any, Any], list[Row]]:
        pairs: dict[tuple[Any, Any], list[Row]] = {}
        for row in self.way(method):
            pairs.setdefault((row["source"], row["anchor"]), []).append(row)
        return pairs

    def spread(self, method: str) -> list[str]:
        """How many seeds of learning a pair has, the standard deviation of what they leave within pairs (pooled), and
        the most that one leaves."""
        seeds = list(self.by_seed(method).values())
        several = [shares for shares in seeds if len(shares) > 1]
        if not several:
            return ["–"] * len(BY_SEED)
        free = sum(len(shares) - 1 for shares in several)
        pooled = math.sqrt(sum((len(shares) - 1) * statistics.variance(shares) for shares in several) / free)
        return [str(min(map(len, seeds))), f"{100 * pooled:.2f}", f"{100 * max(map(max, seeds)):.2f}"]

    def gains(self, worse: str, good: str) -> list[float]:
        """By how many shares of the plain barrier one way leaves less than another, by pair that has both."""
        one, other = self.by_pair(worse), self.by_pair(good)
        return [one[pair] - other[pair] for pair in one if pair in other]

    def few(self, first: str, second: str, third: str, share: float) -> list[float]:
        """By pair that has all three ways: by how much the gain of the third is under a share of that of the second."""
        a, b, c = (self.by_pair(method) for method in (first, second, third))
        return [share * (a[pair] - b[pair]) - (b[pair] - c[pair]) for pair in a if pair in b and pair in c]

    def left(self, method: str) -> str:
        return f"{method} {mean_error(self.shares(method), 1, 100)} %"

    def less(self, good: str, worse: str) -> tuple[str, bool | None]:
        """What each leaves of the plain barrier, and whether the first leaves less."""
        gains = self.gains(worse, good)
        return f"{self.left(good)}, {self.left(worse)} of plain", better(gains) if gains else None

    def none(self, method: str) -> tuple[str, bool | None]:
        """What a way leaves of the plain barrier, and whether its mean over pairs is below NOTHING (or above)."""
        shares = self.shares(method)
        return f"{self.left(method)} of plain", better([NOTHING - share for share in shares]) if shares else None

    def line(self, method: str) -> list[str]:
        pairs = self.rows_by_pair(method).values()

        def mean(value: Callable[[Row], float], digits: int) -> str:
            return mean_error([statistics.fmean(map(value, rows)) for rows in pairs], digits)

        cells = [
            mean(lambda row: row["barrier"], 3),
            mean_error(self.shares(method), 1, 100),
            mean(lambda row: row["barrier over mean"], 3),
            mean_error(self.shares(method, "barrier over mean"), 1, 100),
            mean(lambda row: row["midpoint loss"], 3),
            mean(lambda row: row["midpoint accuracy"], 3),
            mean(lambda row: min(accuracy for _, _, accuracy in row["curve"]), 3),
            mean(lambda row: row["seconds"], 0),
            *(self.spread(method) if self.has_seeds else []),
        ]
        shares = [
            f"{paper[method]:.2f} ({100 * paper[method] / paper['plain']:.0f} %)" if method in paper else "–"
            for paper in self.papers.values()
        ]
        return [method, str(len(pairs)), *cells, *shares]

    @property
    def has_seeds(self) -> bool:
        return any(row.get("seed") for row in self.rows)

    def table(self) -> str:
        methods = dict.fromkeys(row["method"] for row in self.rows)
        head = [*HEAD, *(BY_SEED if self.has_seeds else ())]
        return table([*head, *(f"paper: {name}" for name in self.papers)], map(self.line, methods))

    def ends(self) -> str:
        rows = self.way("plain")
        losses, accuracies = ([x for row in rows for x in row[name]] for name in ("end losses", "end accuracies"))
        return f"Ends: loss {mean_error(losses, 3)}, accuracy {mean_error(accuracies, 3)}."


def ordered(rows: Sequence[Row], methods: Sequence[str]) -> list[Row]:
    """By method, then by pair; pairs in the order of their names."""
    place = {method: number for number, method in enumerate(methods)}
    return sorted(rows, key=lambda row: (place[row["method"]], str(row["source"]), str(row["anchor"])))


def draw_curves(axes: Any, paths: Sequence[Paths], methods: Sequence[str]) -> None:
    """Loss and accuracy along the paths, in two rows of axes, a column for each: means over pairs at the places where
    all pairs were measured."""
    for column, of_family in enumerate(paths):
        for method, colour, dash in zip(methods, COLOURS, DASHES, strict=False):
            for line, quantity in enumerate(("loss", "accuracy") if of_family.way(method) else ()):
                curves = [{point[0]: point[1 + line] for point in row["curve"]} for row in of_family.way(method)]
                common = sorted(set.intersection(*(set(curve) for curve in curves)))
                values = [statistics.fmean(curve[at] for curve in curves) for at in common]
                axes[line][column].plot(common, values, color=colour, linestyle=dash, label=method)
                axes[line][0].set_ylabel(quantity)
        axes[1][column].set_xlabel("λ")
