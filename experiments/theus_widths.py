"""Theus et al. 2025, models of different widths: the narrow one expanded exactly, and matched to the wide one."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from drawing import figure, legend
from families import Seed
from paths import NOTHING, Paths, draw_curves, measured, ordered
from study import Claim, Key, Part, Row, Study
from ways import OPTIONS, Apart, Outcome, Way, learning_record

from symfuse.alignment import Alignment
from symfuse.matching.learned import match_learned
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.widths import expand, match_widths


def plain(apart: Apart, _: Path) -> Outcome:
    """The narrow one expanded, its units copied in turn."""
    narrow, wide = map(Model.of, apart.models)
    return Outcome((expand(narrow, wide).checkpoint, wide.checkpoint))


def matched(apart: Apart, _: Path) -> Outcome:
    """Expanded, and matched from the weights with its copies chosen."""
    return _both(*_matched(apart))


def learned(apart: Apart, journal: Path) -> Outcome:
    """From there."""
    expanded, wide, start = _matched(apart)
    learning = apart.learning(journal)
    alignment = match_learned(expanded, canonical(wide, start.frame), learning, start=start, axes="all")
    return Outcome(_both(expanded, wide, alignment).models, learning_record(alignment))


def _matched(apart: Apart) -> tuple[Model, Model, Alignment]:
    narrow, wide = map(Model.of, apart.models)
    expanded, alignment = match_widths(narrow, wide)
    return expanded, wide, alignment


def _both(expanded: Model, wide: Model, alignment: Alignment) -> Outcome:
    return Outcome((alignment(expanded.checkpoint), alignment.in_frame(wide.checkpoint)))


WAYS: dict[str, Way] = {"plain": plain, "weight matching": matched, "learned orthogonal": learned}


class Widths(Study):
    """Options: families: {NARROW: {wide: NAME, pairs: [[seed of the narrow, seed of the wide], …], and the options of
    `Apart`}}."""

    name = "theus_widths"
    paper = "theus"
    title = "Theus et al., models of different widths"
    keys = ("family", "source", "anchor", "method")
    known = ("families", "wide", "pairs", *OPTIONS)
    about = """
A model of half the width is expanded exactly to the width of another (units are copied, and the weights that read
them are divided among the copies), and matched to it. Plain: every unit copied once. Weight matching: the stream
rotated, the copies selected anew for the result (in the rotatable form, as in Table 2). Learned: starts from there.
The path then connects two models of the wide shape; columns as in Table 2.
"""

    def parts(self) -> Iterator[Part]:
        for name, about in self.options["families"].items():
            yield from ((name, *pair, method) for pair in about["pairs"] for method in WAYS)

    def models(self) -> Iterator[tuple[str, Seed]]:
        for name, about in self.options["families"].items():
            yield from (one for first, last in about["pairs"] for one in ((name, first), (about["wide"], last)))

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        if part not in done:
            name, first, last, method = part
            about = self.options["families"][name]
            apart = Apart(self.config, about["wide"], (first, last), about, narrow=name)
            yield {**dict(zip(self.keys, part, strict=True)), **measured(apart, method, WAYS[method])}

    def tables(self, rows: Sequence[Row]) -> str:
        parts, rows = [], ordered(rows, list(WAYS))
        for name in self.options["families"]:
            paths = Paths.of(rows, family=name)
            parts.append(f"**{name}**. {paths.ends()}\n\n{paths.table()}")
        return "\n\n".join(parts)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        claims = []
        for name in self.options["families"]:
            paths = Paths.of(rows, family=name)
            for good, worse in (("weight matching", "plain"), ("learned orthogonal", "weight matching")):
                if not paths.way(good):
                    continue
                here, holds = paths.less(good, worse)
                claims.append(
                    Claim(f"other widths: {good} leaves a lower barrier than {worse}", f"{name}: {here}", holds)
                )
            if not paths.way("learned orthogonal"):
                continue
            says = f"other widths: learned, no barrier is left (at most {NOTHING:.0%} of the plain one)"
            here, holds = paths.none("learned orthogonal")
            claims.append(Claim(says, f"{name}: {here}", holds))
        return claims

    def draw(self, rows: Sequence[Row], file: Path) -> None:
        names = list(self.options["families"])
        with figure(file, 2, len(names), (2.4, 1.9)) as axes:
            draw_curves(axes, [Paths.of(rows, family=name) for name in names], list(WAYS))
            for one, name in zip(axes[0], names, strict=True):
                one.set_title(f"{name}, expanded")
            legend(axes)
