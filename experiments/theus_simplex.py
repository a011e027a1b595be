"""Theus et al. 2025, many models: the loss over the simplex of three that were trained apart."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from drawing import figure
from families import Seed, held
from paths import NOTHING
from study import Claim, Key, Part, Row, Study, better, mean_error, table
from ways import OPTIONS, Apart, Outcome, Way, learning_record, outcome_of, plain

import symfuse
from symfuse.matching.learned import learn
from symfuse.matching.universe import Universe, match_universe
from symfuse.model import Model

PARTS = 6  # of a side


@functools.lru_cache(maxsize=1)
def universe(apart: Apart) -> Universe:
    return match_universe([Model.of(model) for model in apart.models], axes="all")


def matched(apart: Apart, _: Path) -> Outcome:
    pairs = zip(universe(apart).alignments, apart.models, strict=True)
    return Outcome(tuple(held(alignment(model)) for alignment, model in pairs))


def learned(apart: Apart, journal: Path) -> Outcome:
    models = [Model.of(model) for model in apart.models]
    alignments = learn(models, universe(apart).alignments, apart.learning(journal), axes="all")
    aligned = tuple(alignment(model) for alignment, model in zip(alignments, apart.models, strict=True))
    return Outcome(aligned, learning_record(alignments[0]))


WAYS: dict[str, Way] = {"plain": plain, "weight matching": matched, "learned": learned}


class Simplex(Study):
    """Options: families: {NAME: {METHOD of WAYS: [[seed, seed, seed], …], and the options of `Apart`}}."""

    name = "theus_simplex"
    paper = "theus"
    title = "Theus et al., the simplex of three models"
    keys = ("family", "seeds", "method")
    known = ("families", *WAYS, *OPTIONS)
    about = f"""
Three independently trained models, averaged with all weights in steps of 1/{PARTS}. Barrier: the largest rise of the
test loss above the plane through the losses of the three; or above their mean. Weight matching: to the universe, each
in turn to the mean of all, in the form in which the stream can be rotated (Table 2 shows the effect of that form
alone). Learned: starts from there and minimises the loss of random points of the simplex.
"""

    def parts(self) -> Iterator[Part]:
        for name, about in self.options["families"].items():
            triples = dict.fromkeys(tuple(seeds) for method in WAYS for seeds in about.get(method, []))
            yield from ((name, *seeds) for seeds in triples)

    def models(self) -> Iterator[tuple[str, Seed]]:
        for name, *seeds in self.parts():
            yield from ((name, seed) for seed in seeds)

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        name, *seeds = part
        about = self.options["families"][name]
        apart = Apart(self.config, name, tuple(seeds), about)
        for method in WAYS:
            row: Row = {"family": name, "seeds": seeds, "method": method}
            if seeds in about.get(method, []) and self.key(row) not in done:
                yield {**row, **self.measured(apart, method)}

    def measured(self, apart: Apart, method: str) -> Row:
        outcome = outcome_of(apart, f"{method} simplex", WAYS[method])
        task, points = apart.family.task("test"), []
        for i, j in itertools.product(range(PARTS + 1), repeat=2):
            if i + j <= PARTS:
                weights = [i / PARTS, j / PARTS, (PARTS - i - j) / PARTS]
                score = symfuse.evaluate(symfuse.merge(outcome.models, weights=weights), task, build=apart.family.build)
                points.append([*weights, score.loss, score.metrics["accuracy"]])
        return {**of_points(points), **outcome.about}

    def tables(self, rows: Sequence[Row]) -> str:
        head = ("family", "way", "triples", "barrier", "% of plain", "over the mean", "loss at the centre",
            "accuracy there", "mean of the corners")  # fmt: skip
        lines = []
        for name, method in itertools.product(self.options["families"], WAYS):
            if rows_here := rows_of(rows, name, method):
                shares = [share for _, share in self.shares(rows, name, method)]
                columns: list[tuple[list[float], int]] = [
                    ([row["barrier"] for row in rows_here], 3),
                    ([100 * share for share in shares], 1),
                    ([row["barrier over mean"] for row in rows_here], 3),
                    ([row["center"][0] for row in rows_here], 3),
                    ([row["center"][1] for row in rows_here], 3),
                    ([fmean(row["end losses"]) for row in rows_here], 3),
                ]
                lines.append(
                    [name, method, str(len(rows_here)), *(mean_error(values, digits) for values, digits in columns)]
                )
        return table(head, lines)

    def shares(self, rows: Sequence[Row], name: str, method: str) -> list[tuple[Any, float]]:
        """What is left of the plain barrier, by triple that has one."""
        plain = {tuple(row["seeds"]): row["barrier"] for row in rows_of(rows, name, "plain")}
        others = ((tuple(row["seeds"]), row["barrier"]) for row in rows_of(rows, name, method))
        return [(seeds, barrier / plain[seeds]) for seeds, barrier in others if plain.get(seeds)]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        claims = []
        for name in self.options["families"]:
            left = {method: dict(self.shares(rows, name, method)) for method in WAYS}
            percent = {method: f"{mean_error(shares.values(), 1, 100)} %" for method, shares in left.items()}
            for good, worse in (("weight matching", "plain"), ("learned", "weight matching")):
                gains = [left[worse][seeds] - share for seeds, share in left[good].items() if seeds in left[worse]]
                if gains:
                    here = f"{name}: {percent[good]} against {percent[worse]} of plain"
                    claims.append(
                        Claim(f"three models: {good} leaves a lower barrier than {worse}", here, better(gains))
                    )
            if left["learned"]:
                says = (
                    f"three models: learned, no barrier is left on the simplex (at most {NOTHING:.0%} of the plain one)"
                )
                holds = better([NOTHING - share for share in left["learned"].values()])
                claims.append(Claim(says, f"{name}: {percent['learned']} of plain", holds))
        return claims

    def draw(self, rows: Sequence[Row], file: Path) -> None:
        """The losses over the triangle of the first triple that has all ways; one scale of colours a family."""
        names = list(self.options["families"])
        with figure(file, len(names), len(WAYS), (2.1, 1.8)) as axes:
            for line, name in zip(axes, names, strict=True):
                first = {method: rows_here[0] for method in WAYS if (rows_here := rows_of(rows, name, method))}
                losses = [point[3] for row in first.values() for point in row["points"]]
                for one, method in zip(line, WAYS, strict=True):
                    one.axis("off")
                    if method in first:
                        _triangle(one, first[method]["points"], min(losses), max(losses))
                        one.set_title(f"{name}: {method}")


def _triangle(axes: Any, points: Sequence[Sequence[float]], low: float, high: float) -> None:
    import numpy as np

    x = [b + c / 2 for _, b, c, *_ in points]
    y = [c * 3**0.5 / 2 for _, _, c, *_ in points]
    drawn = axes.tricontourf(x, y, [point[3] for point in points], levels=np.linspace(low, high, 13), cmap="viridis")
    axes.set_aspect("equal")
    axes.figure.colorbar(drawn, ax=axes, shrink=0.7, format="%.2f", ticks=[low, (low + high) / 2, high])


def of_points(points: Sequence[Sequence[float]]) -> Row:
    """points: three weights, the loss and the accuracy of each."""
    corners = [next(point[3] for point in points if point[i] == 1.0) for i in range(3)]
    return {
        "barrier": max(p[3] - sum(w * c for w, c in zip(p, corners, strict=False)) for p in points),
        "barrier over mean": max(p[3] for p in points) - fmean(corners),
        "center": list(next(p[3:] for p in points if p[0] == p[1] == p[2])),
        "end losses": corners,
        "points": [list(point) for point in points],
    }


def rows_of(rows: Sequence[Row], name: str, method: str) -> list[Row]:
    selected = [row for row in rows if (row["family"], row["method"]) == (name, method)]
    return sorted(selected, key=lambda row: row["seeds"])
