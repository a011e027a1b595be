"""Verma & Elbayad 2024, the ablation of data: the barrier by how much there is to take activations from."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from drawing import COLOURS, DASHES, figure, legend
from study import Claim, Key, Part, Row, mean_error, table
from verma import INSIDE, PLAIN, Permuted
from ways import SEED


class Amounts(Permuted):
    """Options: models: as of `Permuted`, each with amounts: numbers of windows (or of receptors, or texts), batches: to
    draw them from. draws: of each amount."""

    name = "verma_data"
    paper = "verma"
    title = "Verma & Elbayad, how much data matching takes"
    keys = ("models", "source", "anchor", "windows", "draw")
    known = ("models", "pairs", "points", "draws", "batches", "amounts")
    about = """
Feed-forward neurons and heads matched (head-aware permutations, residual stream not matched) from the activations on
the given number of windows of 16 letters (`bert`) or receptors (`sceptr`), drawn three times; the draws do not
overlap as long as there are enough of them. The barrier here is the highest of three points of the path, including
its middle, over the mean of both models. We have neither the paper's figures nor its statements on them, so nothing
is claimed.
"""
    ways: ClassVar[Mapping[str, Mapping[str, Any]]] = {PLAIN: {}, "matched": INSIDE}

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        pair = self.pair(part)
        about, draws = self.options["models"][pair.name], self.options["draws"]
        wanted = [(0, 0), *((n, draw) for n in about["amounts"] for draw in range(draws))]
        rows = [self.start(pair) | {"windows": n, "draw": draw} for n, draw in wanted]
        rows = [row for row in rows if self.key(row) not in done]
        if not rows:
            return
        models, data_of_all = pair.models, self.for_activations(pair, about["batches"])
        random.Random(SEED).shuffle(data_of_all["data"])  # texts may come by their length
        for row in rows:
            n, draw = row["windows"], row["draw"]
            data = cut(data_of_all["data"], len(data_of_all["data"]) * draw // draws, n)
            aligned = self.aligned("matched" if n else PLAIN, models, {**data_of_all, "data": data})
            yield row | self.path(pair, models, aligned)

    def tables(self, rows: Sequence[Row]) -> str:
        amounts = sorted({row["windows"] for row in rows})
        lines = []
        for name in self.options["models"]:
            cells = (mean_error([fmean(one) for one in self.above(rows, name, n)]) for n in amounts)
            lines.append([name, *cells])
        return table(["windows", *(str(n) if n else PLAIN for n in amounts)], lines)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:  # noqa: ARG002
        return []

    def draw(self, rows: Sequence[Row], file: Path) -> None:
        names = list(self.options["models"])
        with figure(file, columns=len(names)) as axes:
            for one, name in zip(axes[0], names, strict=True):
                amounts = sorted({row["windows"] for row in rows if row["models"] == name} - {0})
                above = [self.above(rows, name, n) for n in amounts]
                pairs = [[fmean(pair[i]) for pair in above] for i in range(len(above[0]))]
                for i, (pair, plain) in enumerate(zip(pairs, self.above(rows, name, 0), strict=True)):
                    colour, dash = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]
                    one.plot(amounts, pair, color=colour, linestyle=dash, marker=".", label=f"pair {i + 1}")
                    one.axhline(plain[0], color=colour, linestyle=dash, linewidth=0.5)
                one.set(title=name, xlabel="windows", xscale="log")
            axes[0][0].set_ylabel("barrier (thin: plain)")
            legend(axes)

    def above(self, rows: Sequence[Row], name: str, windows: int) -> list[list[float]]:
        """Of each pair the barriers of all draws."""
        pairs: dict[str, list[float]] = {}
        selected = (row for row in rows if (row["models"], row["windows"]) == (name, windows))
        for row in sorted(selected, key=lambda row: (str(row["source"]), str(row["anchor"]), row["draw"])):
            pairs.setdefault(f"{row['source']} {row['anchor']}", []).append(row["above"])
        return list(pairs.values())


def cut(batches: Sequence[dict[str, Any]], start: int, rows: int) -> list[dict[str, Any]]:
    """So many rows of batches from one of them on; after the last comes the first."""
    out, left = [], rows
    for batch in (*batches[start:], *batches[:start]):
        if left <= 0:
            break
        out.append({name: field[:left] for name, field in batch.items()})
        left -= len(next(iter(batch.values())))
    return out
