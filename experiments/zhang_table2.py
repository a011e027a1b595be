"""Zhang et al. 2025, Table 2: pairs of ViTs, merged by four methods, without matching, with it, and with scales."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from families import held
from fusing import WAYS, Member, Way
from matchings import Matched, Pair, PairStudy, aligned_by, gains, matched
from study import Claim, Key, Part, Row, better, mean_error, table

import symfuse
from symfuse.evaluation import Task
from symfuse.io import Checkpoint

# The paper's words for matchings.
COLUMNS = {"none": "none", "match": "both", "scaling match": "both, scaled", "all axes": "all axes"}
BEST = "match, best layer"
# Accuracy on CIFAR-10 in percent, without matching and with the best layer matched.
PAPER = {"simple": (7.60, 10.22), "Fisher": (17.96, 18.61), "RegMean": (14.24, 15.31), "OT": (32.08, 32.50)}

Method = Callable[[Matched, Task], Checkpoint]


def transported(pair: Matched, data: Task) -> Checkpoint:  # noqa: ARG001 - a method like the others
    """The mean after optimal transport by symfuse; of a stream that is rotated already, inside the layers only."""
    axes: Any = ("attention", "heads", "ffn") if pair.framed else "all"
    soft = symfuse.match(pair.source, to=pair.anchor, axes=axes, variants=["transport"])
    return symfuse.merge([soft(pair.source), pair.anchor])


def transported_by_peer(pair: Matched, data: Task) -> Checkpoint:  # noqa: ARG001
    """The same by the peer."""
    aligned = aligned_by("OT, soft, residual kept" if pair.framed else "OT, soft", pair.source, pair.anchor)
    return symfuse.merge([aligned, pair.anchor])


def of_fusing(way: Way) -> Method:
    """With statistics, if there are any, of each model as it is merged."""
    return lambda matched_pair, data: way([Member(model, data) for model in (matched_pair.source, matched_pair.anchor)])


METHODS: dict[str, Method] = {
    **{name: of_fusing(WAYS[name]) for name in ("simple", "Fisher", "RegMean")},
    "OT": transported,
    "OT, peer": transported_by_peer,
}


class Merges(PairStudy):
    """Options: batches: of training data, that methods look at."""

    name = "zhang_table2"
    paper = "zhang"
    title = "Zhang et al., Table 2: pairs of ViTs"
    keys = ("models", "source", "anchor", "method", "matching")
    known = ("models", "pairs", "batches")
    about = """
Two ViTs that were trained independently on the same images (vit: digits; fashion: clothes), merged by four methods:
without matching; after the paper's matching (rotations of attention, a permutation of feed-forward neurons; then with
scales); and after matching all axes, with the residual stream rotated too (not in the paper; the anchor is in the
same frame).

- "best layer" is the paper's selection for its ViTs: one layer is matched, the one whose merge is best on the part
  "match". The paper's figures with matching are in this row.
- Accuracy is on the test part. Fisher and RegMean use training images, on the models as they are merged.
- "OT" transports all axes by symfuse's soft maps from the weights. "OT, peer" is OT fusion as in Imfeld et al. Where
  the stream was rotated, both transport only the axes inside of layers.

The paper's ViTs are larger; on its CIFAR-10 chance is 10 %.
"""

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        pair = self.pair(part)
        source, anchor = pair.models
        data = self.config.family(pair.name).training(self.options["batches"])
        for column, matching in COLUMNS.items():
            if wanted := self._wanted(pair, column, done):
                matched_pair = matched(matching, source, anchor)
                for row in wanted:
                    yield row | {"accuracy": pair.accuracy(held(METHODS[row["method"]](matched_pair, data)))}
        if wanted := self._wanted(pair, BEST, done):
            depth = int(symfuse.declare(source).sizes["l"])
            single = [matched(COLUMNS["match"], source, anchor, [layer]) for layer in range(depth)]
            for row in wanted:
                yield row | self._best(
                    [held(METHODS[row["method"]](matched_pair, data)) for matched_pair in single], pair
                )

    def _wanted(self, pair: Pair, column: str, done: Container[Key]) -> list[Row]:
        """How the rows of all methods begin, but of those that are done."""
        rows = [self.start(pair) | {"method": method, "matching": column} for method in METHODS]
        return [row for row in rows if self.key(row) not in done]

    def _best(self, merged: Sequence[Checkpoint], pair: Pair) -> Row:
        """By layer that was matched."""
        accuracies = [pair.accuracy(model, "match") for model in merged]
        layer = max(range(len(accuracies)), key=accuracies.__getitem__)
        return {"accuracy": pair.accuracy(merged[layer]), "layer": layer, "match part": accuracies}

    def tables(self, rows: Sequence[Row]) -> str:
        columns = (*COLUMNS, BEST)
        lines = [
            [name, method, *(mean_error(self.accuracies(rows, method, c, models=name), 1, 100) for c in columns)]
            for name in self.options["models"]
            for method in METHODS
        ]
        for method, (before, after) in PAPER.items():
            known = {"none": f"{before:.2f}", BEST: f"{after:.2f}"}
            lines.append(["paper: CIFAR-10", method, *(known.get(column, "–") for column in columns)])
        return f"Accuracy in percent:\n\n{table(['models', 'method', *columns], lines)}"

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        compared = [(f"matching the best layer raises the accuracy: {m}", m, "none", BEST) for m in METHODS]
        compared += [(f"so does matching all layers: {m}", m, "none", "match") for m in METHODS]
        compared += [
            ("rescaling gains beside that: simple", "simple", "match", "scaling match"),
            ("rotating the residual stream too gains more: simple (not in the paper)", "simple", "match", "all axes"),
        ]
        return [self._claim(rows, *one) for one in compared]

    def _claim(self, rows: Sequence[Row], says: str, method: str, base: str, column: str) -> Claim:
        more = gains(*(self.accuracies(rows, method, which) for which in (column, base)))
        return Claim(says, f"{mean_error(more, 1, 100, '+')} points over {len(more)} pairs", better(more))

    def accuracies(self, rows: Sequence[Row], method: str, column: str, **where: str) -> list[float]:
        return self.values(rows, "accuracy", method=method, matching=column, **where)
