"""Verma & Elbayad 2024, Table 3: models that were trained apart and then fine-tuned on one classification task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar

from study import Claim, Row, mean_error, table
from verma import INSIDE, PLAIN, Permuted, permuted

RECORDED, WEIGHTS = "feed-forward and heads", "the same from weights"
STREAM = "all, with the residual stream"


class Table3(Permuted):
    """Options: as of `Permuted`, of what is fine-tuned; seeds are [domain, seed]."""

    name = "verma_table3"
    paper = "verma"
    title = "Verma & Elbayad, Table 3: classification tasks"
    known = ("models", "pairs", "points", "heard")
    about = """
The independently trained character BERTs, each fine-tuned with a new head (the same initial one for all) on a task
that fits into 16 letters (experiments/letters.py): the part of speech of the word in the middle, whether both halves
belong together, whether two letters were swapped, whether a sentence ends in the middle. Three disjoint pairs per
task are merged, plainly and after matching: feed-forward neurons and heads (head-aware permutations, the residual
stream not matched) from activations on training texts, or from weights; and all axes, the stream by its first point
and the pooler with them, as in the script of the paper's repository. The paper has MultiBERTs on eight tasks of GLUE
and reports lower barriers by matching in six; we have none of its figures by task.
"""
    ways: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        PLAIN: {},
        RECORDED: INSIDE,
        WEIGHTS: {**INSIDE, "weights": True},
        STREAM: permuted("all", residual="first"),
    }

    def models(self) -> Iterator[tuple[str, Any]]:
        """The bases of families first."""
        named = list(super().models())
        bases = [
            (base, seed[1]) for name, seed in named if (base := self.config.tuned[name]["base"]) in self.config.families
        ]
        yield from dict.fromkeys([*bases, *named])

    def tables(self, rows: Sequence[Row]) -> str:
        head = ["task", "accuracy of the models, %"]
        head += [f"{what}: {way}" for what in ("barrier", "midpoint accuracy, %") for way in self.ways]
        lines = []
        for name in self.options["models"]:
            cells = [mean_error(self.values(rows, "above", models=name, way=way)) for way in self.ways]
            cells += [
                mean_error(self.values(rows, "midpoint accuracy", models=name, way=way), 1, 100) for way in self.ways
            ]
            lines.append([name, self.accuracy(rows, name), *cells])
        return table(head, lines)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        means = {
            (name, way): fmean(self.values(rows, "above", models=name, way=way))
            for name in self.options["models"]
            for way in (PLAIN, RECORDED)
        }
        names = list(self.options["models"])
        lower = [name for name in names if means[name, RECORDED] < means[name, PLAIN]]
        here = f"on {len(lower)} of {len(names)}: {', '.join(lower) or 'none'}"
        more = 2 * len(lower) - len(names)
        says = "on most tasks (six of eight) the barrier is lower with matching"
        most = Claim(says, here, more > 0 if more else None)
        each = [self.lower(rows, name, (RECORDED, PLAIN), "matching lowers the barrier of a task") for name in names]
        return [most, *each]
