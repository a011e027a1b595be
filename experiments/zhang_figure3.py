"""Zhang et al. 2025, Figure 3: what matching attention, feed-forward blocks and scales each gain."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from drawing import COLOURS, figure, legend
from matchings import PairStudy, gains, matched
from study import Claim, Key, Part, Row, better, mean_error, table

WAYS = ("attention", "attention, scaled", "ffn", "ffn, scaled", "both", "both, scaled")


class Ablation(PairStudy):
    name = "zhang_figure3"
    paper = "zhang"
    title = "Zhang et al., Figure 3: ablation of the matching"
    keys = ("models", "source", "anchor", "matching")
    known = ("models", "pairs")
    about = """
The plain average of two models that were matched in part: by rotations of attention, by a permutation of feed-forward
neurons, or both, each without and with rescaling. Accuracy is on the test part; for fine-tuned models it is the mean
over the tests of both domains. Five merges are of independently trained models (vit, fashion, bert, gpt2, sceptr),
one is of fine-tunes of MiniLM (sentiment). Neurons behind a GELU cannot be rescaled; of these models only sceptr has
ReLU. We do not have the paper's gains by merge as figures.
"""

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        pair = self.pair(part)
        source, anchor = pair.models
        for way in ("none", *WAYS):
            row = self.start(pair) | {"matching": way}
            if self.key(row) not in done:
                yield row | {"accuracy": pair.accuracy(matched(way, source, anchor).mean)}

    def tables(self, rows: Sequence[Row]) -> str:
        lines = [
            [
                name,
                mean_error(self.values(rows, "accuracy", models=name, matching="none"), 1, 100),
                *(mean_error(self.gains(rows, way, models=name), 1, 100, "+") for way in WAYS),
            ]
            for name in self.options["models"]
        ]
        lines.append(["all pairs", "", *(mean_error(self.gains(rows, way), 1, 100, "+") for way in WAYS)])
        caption = "Accuracy of the plain average in percent, and what matching adds, in points:"
        return f"{caption}\n\n{table(['merge', 'none', *WAYS], lines)}"

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        compared = {
            "matching attention gains accuracy": ("attention", "none"),
            "matching feed-forward blocks gains accuracy": ("ffn", "none"),
            "matching both gains accuracy": ("both", "none"),
            "both gain more than attention alone": ("both", "attention"),
            "both gain more than feed-forward blocks alone": ("both", "ffn"),
            "rescaling adds to both": ("both, scaled", "both"),
        }
        claims = []
        for says, (way, base) in compared.items():
            more = self.gains(rows, way, base)
            here = f"{mean_error(more, 1, 100, '+')} points over {len(more)} pairs"
            claims.append(Claim(f"{says} (simple merge)", here, better(more)))
        return claims

    def draw(self, rows: Sequence[Row], file: Path) -> None:
        names = list(self.options["models"])
        with figure(file, size=(6.4, 2.6)) as axes:
            one = axes[0][0]
            for i, (way, colour) in enumerate(zip(WAYS, COLOURS, strict=False)):
                heights = [100 * fmean(self.gains(rows, way, models=name)) for name in names]
                one.bar([at + (i - 2.5) / 8 for at in range(len(names))], heights, 1 / 8, color=colour, label=way)
            one.axhline(0, color="black", linewidth=0.6)
            one.set(xticks=range(len(names)), xticklabels=names, ylabel="gain in accuracy, points")
            legend(axes, columns=len(WAYS))

    def gains(self, rows: Sequence[Row], way: str, base: str = "none", **where: str) -> list[float]:
        """By pair."""
        here, before = (self.values(rows, "accuracy", matching=matching, **where) for matching in (way, base))
        return gains(here, before)
