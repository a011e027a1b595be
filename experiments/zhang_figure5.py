"""Zhang et al. 2025, Figure 5: the loss on the plane through a model, its matched copy and the other, and barriers."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from drawing import COLOURS, DASHES, figure, legend
from matchings import Matched, Pair, PairStudy, gains, matched
from study import Claim, Key, Part, Row, better, mean_error, table

import symfuse

WAYS = ("none", "attention", "ffn", "both", "all axes")
FRAMED = "none, in its frame"  # that of "all axes"
PLANES = ("both", "all axes")


class Landscapes(PairStudy):
    """Options: steps: of a plane, on each side; points: on a path, evenly spaced."""

    name = "zhang_figure5"
    paper = "zhang"
    title = "Zhang et al., Figure 5: landscapes and barriers"
    keys = ("models", "source", "anchor", "kind", "matching")
    known = ("models", "pairs", "points", "steps")
    about = """
The loss on the test part along the straight path between two independently trained models, without and with matching,
three pairs of each; and for the first pair on the plane through a model A, the same model matched (A'), and the other
(B). The barrier is the largest rise of the loss above the chord between its ends; the excess is the mean of the rise
along the path. "both" is the paper's matching, attention and feed-forward blocks. "all axes" includes the residual
stream, for pre-norm models in a frame, where unmatched models have another barrier ("none, in its frame"). We do not
have the paper's own barriers.
"""

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        pair = self.pair(part)
        source, anchor = pair.models
        for way in (*WAYS, FRAMED):
            row = self.start(pair) | {"kind": "path", "matching": way}
            if self.key(row) in done:
                continue
            pair_ = matched("all axes" if way == FRAMED else way, source, anchor)
            if way != FRAMED:
                yield row | self._path(pair, pair_.source, pair_)
            elif pair_.framed:
                yield row | self._path(pair, pair_.plain, pair_)
        for way in PLANES if part[1] == 0 else ():
            row = self.start(pair) | {"kind": "plane", "matching": way}
            if self.key(row) not in done:
                yield row | self._plane(pair, matched(way, source, anchor))

    def _path(self, pair: Pair, source: Any, matched_pair: Matched) -> Row:
        (task,) = pair.tasks("test")
        points = self.options["points"]
        curve = symfuse.barrier(source, matched_pair.anchor, task, points=points, build=pair.build).curves["none"]
        even = [p for p in curve.points if abs(p.at * (points - 1) - round(p.at * (points - 1))) < 1e-9]
        return {
            "at": [p.at for p in even],
            "loss": [p.score.loss for p in even],
            "barrier": curve.barrier,
            "excess": fmean(curve.excess(p) for p in even),
        }

    def _plane(self, pair: Pair, matched_pair: Matched) -> Row:
        (task,) = pair.tasks("test")
        models = {"A": matched_pair.plain, "A'": matched_pair.source, "B": matched_pair.anchor}
        plane = symfuse.landscape(models, task, steps=self.options["steps"], build=pair.build)
        return {
            "corners": {name: [x, y] for name, (x, y) in zip(plane.names, plane.plane.corners, strict=True)},
            "x": list(plane.xs),
            "y": list(plane.ys),
            "loss": [[score.loss for score in row] for row in plane.scores],
        }

    def tables(self, rows: Sequence[Row]) -> str:
        ways = (*WAYS[:-1], FRAMED, WAYS[-1])
        lines = [
            [f"{name}, {of}", *(mean_error(self.paths(rows, of, name, way)) for way in ways)]
            for name in self.options["models"]
            for of in ("barrier", "excess")
        ]
        return f"In nats:\n\n{table(['models', *ways], lines)}"

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        compared = {
            "matching attention and feed-forward blocks lowers the barrier": ("barrier", "none", "both"),
            "… and makes the path flatter": ("excess", "none", "both"),
            "moving the residual stream too lowers the barrier further (not in the paper)": (
                "barrier",
                "both",
                "all axes",
            ),
        }
        claims = []
        for name in self.options["models"]:
            for says, (of, base, way) in compared.items():
                before, here = (self.paths(rows, of, name, matching) for matching in (base, way))
                less = gains(before, here)
                text = f"{name}: {of} {mean_error(before)} → {mean_error(here)}, lower by {mean_error(less)}"
                claims.append(Claim(says, text, better(less)))
        return claims

    def draw(self, rows: Sequence[Row], file: Path) -> None:
        names = list(self.options["models"])
        with figure(file, rows=len(names), columns=1 + len(PLANES)) as axes:
            for line, name in zip(axes, names, strict=True):
                for one, way in zip(line, PLANES, strict=False):
                    _contours(
                        one, next(r for r in rows if (r["models"], r["kind"], r["matching"]) == (name, "plane", way))
                    )
                    one.set(title=f"{name}, {way}", xticks=[], yticks=[])
                self._curves(line[-1], [row for row in rows if (row["models"], row["kind"]) == (name, "path")])
                line[-1].set(title=name, xlabel="λ (0: B, 1: A)", ylabel="loss, nats")
            legend(axes)

    def _curves(self, one: Any, rows: Sequence[Row]) -> None:
        """The mean over pairs."""
        for way, colour, dash in zip((*WAYS, FRAMED), COLOURS, DASHES, strict=False):
            if own := [row for row in rows if row["matching"] == way]:
                losses = [fmean(values) for values in zip(*(row["loss"] for row in own), strict=True)]
                one.plot(own[0]["at"], losses, color=colour, linestyle=dash, label=way)

    def paths(self, rows: Sequence[Row], of: str, name: str, way: str) -> list[float]:
        return self.values(rows, of, models=name, kind="path", matching=way)


def _contours(one: Any, row: Row) -> None:
    """Filled, by the logarithm of the loss: it is far higher outside than between the models."""
    import numpy

    losses = numpy.array(row["loss"])
    levels = numpy.geomspace(losses.min(), losses.max(), 13)
    one.contourf(row["x"], row["y"], losses, levels=levels, cmap="viridis", norm="log")
    drawn = one.contour(row["x"], row["y"], losses, levels=levels[::2], colors="white", linewidths=0.4)
    one.clabel(drawn, fmt="%.1f", fontsize=5)
    for name, (x, y) in row["corners"].items():
        one.plot(x, y, "o", color="white", markeredgecolor="black", markersize=4)
        one.annotate(name, (x, y), xytext=(3, 3), textcoords="offset points", color="white", fontweight="bold")
    one.set_aspect("equal")
