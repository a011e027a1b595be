"""Zhang et al. 2025, the curves over layers: one layer matched alone, and the last ones of the model."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from drawing import COLOURS, DASHES, figure, legend
from study import Claim, Key, Part, Row, Study, better, mean_error, table

import symfuse

SETS = ("single", "tail", "head")


class Layers(Study):
    """Options: families: {NAME: {pairs: [[seed, seed], …], axes: …}}."""

    name = "zhang_layers"
    paper = "zhang"
    title = "Zhang et al., matching single layers and tails of layers"
    keys = ("family", "source", "anchor", "set", "layer")
    known = ("families", "pairs", "axes")
    about = """
The plain average of two independently trained models, when only one layer is matched (single), or all layers from one
on (tail), or all up to it (head): attention, heads and feed-forward block. The paper matches layers of fine-tuned
encoders and reports that the layers near the input matter more than those near the output; for its ViT rows it uses
the best single layer on the validation set.
"""

    def parts(self) -> Iterator[Part]:
        for name, about in self.options["families"].items():
            for pair in about["pairs"]:
                yield (name, *pair)

    def models(self) -> Iterator[tuple[str, int]]:
        for name, *seeds in self.parts():
            yield from ((name, seed) for seed in seeds)

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        name, first, second = part
        family = self.config.family(name)
        source, anchor, task = family.model(first), family.model(second), family.task("test")
        depth = int(symfuse.declare(source).sizes["l"])
        wanted = {("none", -1): ()} | {
            (kind, layer): {"single": (layer,), "tail": range(layer, depth), "head": range(layer + 1)}[kind]
            for kind in SETS
            for layer in range(depth)
        }
        for (kind, layer), layers in wanted.items():
            row: Row = {"family": name, "source": first, "anchor": second, "set": kind, "layer": layer}
            if self.key(row) in done:
                continue
            axes = self.options["families"][name]["axes"]
            aligned = symfuse.match(source, to=anchor, axes=axes, layers=list(layers))(source) if layers else source
            score = symfuse.evaluate(symfuse.merge([aligned, anchor]), task, build=family.build)
            distance = symfuse.relate(aligned, anchor).distance.euclidean
            yield row | {"accuracy": score.metrics["accuracy"], "loss": score.loss, "distance": distance}

    def tables(self, rows: Sequence[Row]) -> str:
        parts = []
        for name in self.options["families"]:
            layers = sorted({row["layer"] for row in rows if row["family"] == name} - {-1})
            plain = mean_error(self.of(rows, name, "none", -1), 1, 100)
            lines = [
                [kind, *(mean_error(self.gains(rows, name, kind, layer), 1, 100, "+") for layer in layers)]
                for kind in SETS
            ]
            head = ["layers", *map(str, layers)]
            caption = f"{name}: accuracy of the plain average {plain} %; what matching adds, in points:"
            parts.append(f"{caption}\n\n{table(head, lines)}")
        return "\n\n".join(parts)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        claims = []
        for name in self.options["families"]:
            depth = 1 + max(row["layer"] for row in rows if row["family"] == name)
            half = depth // 2  # a layer in the middle is in neither
            first, last = self.gains(rows, name, "head", half - 1), self.gains(rows, name, "tail", depth - half)
            more = [a - b for a, b in zip(first, last, strict=True)]
            here = (
                f"{name}: {mean_error(first, 1, 100, '+')} against {mean_error(last, 1, 100, '+')} points of accuracy"
            )
            says = "matching the half of the layers near the input gains more than the half near the output"
            claims.append(Claim(says, here, better(more)))
        return claims

    def draw(self, rows: Sequence[Row], file: Path) -> None:
        names = list(self.options["families"])
        with figure(file, columns=len(names)) as axes:
            for one, name in zip(axes[0], names, strict=True):
                layers = sorted({row["layer"] for row in rows if row["family"] == name} - {-1})
                for kind, colour, dash in zip(SETS, COLOURS, DASHES, strict=False):
                    gains = [100 * fmean(self.gains(rows, name, kind, layer)) for layer in layers]
                    one.plot(layers, gains, color=colour, linestyle=dash, label=kind)
                one.set(title=name, xlabel="layer", xticks=layers)
            axes[0][0].set_ylabel("gain in accuracy, points")
            legend(axes)

    def of(self, rows: Sequence[Row], name: str, kind: str, layer: int) -> list[float]:
        """Accuracies, by pair."""
        selected = (row for row in rows if (row["family"], row["set"], row["layer"]) == (name, kind, layer))
        return [row["accuracy"] for row in sorted(selected, key=self.key)]

    def gains(self, rows: Sequence[Row], name: str, kind: str, layer: int) -> list[float]:
        plain = self.of(rows, name, "none", -1)
        return [here - before for here, before in zip(self.of(rows, name, kind, layer), plain, strict=True)]
