"""What the studies of Verma & Elbayad 2024 share: pairs of encoders, permuted by what they do on the same inputs."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar

from families import held, unlabelled
from matchings import Pair, PairStudy
from paths import of_curve
from study import Claim, Key, Part, Row, better, mean_error

import symfuse
from symfuse.evaluation import barrier
from symfuse.io import Checkpoint

PLAIN = "nothing"
HEAD = (
    "above the mean of the models",
    "% of nothing",
    "above the chord",
    "midpoint accuracy, %",
    "change of the moved model",
)


def permuted(*axes: str, **options: Any) -> dict[str, Any]:
    """Options of `symfuse.match` for these axes and permutations only, also inside of heads."""
    inside = {"attention": "permutation"} if {"attention", "all"} & {*axes} else {}  # a group is of an axis to match
    return {"axes": axes, "groups": inside, **options}


INSIDE = permuted("attention", "heads", "ffn")


class Permuted(PairStudy):
    """Options: models: {NAME: {pairs: [[seed, seed], …], points: of a path}}, heard: batches to take activations from.

    ways: by name the options of `symfuse.match`, from activations unless "weights" is one; PLAIN has none.
    """

    keys = ("models", "source", "anchor", "way")
    ways: ClassVar[Mapping[str, Mapping[str, Any]]]

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        pair = self.pair(part)
        rows = [self.start(pair) | {"way": way} for way in self.ways_of(pair.name)]
        wanted = [row for row in rows if self.key(row) not in done]
        if wanted:
            models, data = pair.models, self.for_activations(pair, self.options["heard"])
            for row in wanted:
                yield row | self.path(pair, models, self.aligned(row["way"], models, data), self.variants(row["way"]))

    def ways_of(self, models: str) -> Sequence[str]:  # noqa: ARG002 - for those who override it
        """The names of the ways that go with a family, or with what is fine-tuned."""
        return list(self.ways)

    def variants(self, way: str) -> Sequence[str]:
        """Under which a way is inexact."""
        variants: Sequence[str] = self.ways.get(way, {}).get("variants", ())
        return variants

    def aligned(self, way: str, models: Sequence[Checkpoint], recorded: Mapping[str, Any]) -> Checkpoint:
        """The source as a way moves it towards the anchor."""
        if way == PLAIN:
            return models[0]
        options = dict(self.ways[way])
        data = {"scaling": False, "biases": False} if options.pop("weights", False) else recorded
        return held(symfuse.match(models[0], to=models[1], **data, **options)(models[0]))

    def for_activations(self, pair: Pair, count: int) -> dict[str, Any]:
        """Options of `symfuse.match` for activations of so many batches of the part "train", without their labels."""
        if pair.name not in self.config.tuned:
            return self.config.family(pair.name).for_activations(count)
        tuned = self.config.tune(pair.name)
        return {"data": unlabelled(tuned.part(pair.seeds[0][0], "train", limit=count * tuned.batch).batches)}

    def path(self, pair: Pair, models: Sequence[Checkpoint], aligned: Checkpoint, variants: Sequence[str] = ()) -> Row:
        """The path to the anchor, on the part "test". above: its highest loss over the mean of both models as they are;
        change: of the loss of the moved model, 0 if it is the same function."""
        task, build = pair.tasks("test")[0], pair.build
        points = self.options["models"][pair.name].get("points", self.options.get("points", 11))
        ends = {"path": (aligned, models[1])}
        curve = barrier(ends, task, points=points, refine=0, build=build).curves["path"]
        anchor, source = curve.ends
        own = symfuse.evaluate(models[0], task, build=build).loss
        above = curve.peak_over_mean.score.loss - (own + anchor) / 2
        return {**of_curve(curve), "above": above, "change": source - own, "inexact": list(variants)}

    def lines(self, rows: Sequence[Row], models: str, paper: Mapping[str, str]) -> list[list[str]]:
        """A line for each way: HEAD, and what the paper has."""
        lines = []
        plain = self.values(rows, "above", models=models, way=PLAIN)
        for way in self.ways_of(models):

            def cell(of: str, digits: int = 2, scale: float = 1.0, sign: str = "", way: str = way) -> str:
                return mean_error(self.values(rows, of, models=models, way=way), digits, scale, sign)

            left = [a / b for a, b in zip(self.values(rows, "above", models=models, way=way), plain, strict=True)]
            cells = [cell("above"), mean_error(left, 0, 100), cell("barrier"), cell("midpoint accuracy", 1, 100)]
            lines.append([way, *cells, cell("change", sign="+"), paper.get(way, "–")])
        return lines

    def lower(self, rows: Sequence[Row], models: str, ways: tuple[str, str], says: str) -> Claim:
        """That the first way has a lower barrier than the second."""
        first, second = (self.values(rows, "above", models=models, way=way) for way in ways)
        here = f"{models}: {mean_error(first)} against {mean_error(second)}"
        return Claim(says, here, better([b - a for a, b in zip(first, second, strict=True)]))

    def accuracy(self, rows: Sequence[Row], models: str) -> str:
        """Of the models as they were trained, in percent."""
        ends = self.values(rows, "end accuracies", models=models, way=PLAIN)
        return mean_error([fmean(one) for one in ends], 1, 100)
