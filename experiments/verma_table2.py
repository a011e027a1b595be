"""Verma & Elbayad 2024, Table 2: the barrier of masked language models by how the residual stream is permuted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from study import Claim, Row, table
from verma import HEAD, INSIDE, PLAIN, Permuted, permuted

ALONE = {"first": "residual, first", "last": "residual, last", "all": "residual, all"}
SEPARATE = "residual, one for each point"
WITHIN, WITHIN_ALL = "feed-forward and heads", "feed-forward and heads, residual, all"
PAPER = {PLAIN: "4.95", ALONE["first"]: "7.58", ALONE["last"]: "7.41", ALONE["all"]: "7.34"}


class Table2(Permuted):
    name = "verma_table2"
    paper = "verma"
    title = "Verma & Elbayad, Table 2: permuting the residual stream"
    known = ("models", "pairs", "points", "heard")
    about = """
As in Table 1, with the residual stream permuted and nothing else, by the correlations at its first point, its last,
or summed over all. One for each point: a separate permutation wherever a sublayer has written, which the skip
connections between the points do not follow, so the matched model is another function (symfuse's variant
"separate-residual"). The last two lines are not in the paper's table: the rest of the model matched as well, without
and with the stream. The paper's models are MultiBERTs.
"""
    ways: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        PLAIN: {},
        **{way: permuted("residual", residual=place) for place, way in ALONE.items()},
        SEPARATE: permuted("residual", variants=("separate-residual",)),
        WITHIN: INSIDE,
        WITHIN_ALL: permuted(*INSIDE["axes"], "residual", residual="all"),
    }

    def tables(self, rows: Sequence[Row]) -> str:
        return "\n\n".join(
            f"{name}:\n\n{table(['matched', *HEAD, 'paper, MultiBERTs'], self.lines(rows, name, PAPER))}"
            for name in self.options["models"]
        )

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        return [
            self.lower(rows, name, (PLAIN, way), f"permuting the stream ({way}) raises the barrier ({paper})")
            for name in self.options["models"]
            for way in ALONE.values()
            if (paper := f"{PAPER[PLAIN]} → {PAPER[way]}")
        ]
