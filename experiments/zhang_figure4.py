"""Zhang et al. 2025, Figure 4: how near the models are after each matching, and after those of others."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from drawing import COLOURS, figure, legend
from matchings import MATCHINGS, PEERS, PairStudy, aligned_by, gains, matched
from study import Claim, Key, Part, Row, better, mean_error, table

import symfuse
from symfuse.evaluation import Distance
from symfuse.io import Checkpoint

OURS = tuple(name for name in MATCHINGS if name != "none")
SHOWN = ("per-head permutation", "Git Re-Basin, residual kept", "Git Re-Basin", "OT, hard", "OT, soft")  # of PEERS
PARTS = {"all": None, "attention": ("qk", "v"), "ffn": ("ffn",)}  # axes of the tensors that count


class Distances(PairStudy):
    """Options: in `models` also `without`: peers that take too long there."""

    name = "zhang_figure4"
    paper = "zhang"
    title = "Zhang et al., Figure 4: distances after matching"
    keys = ("models", "source", "anchor", "matching")
    known = ("models", "pairs", "without")
    about = """
The distance ‖A' − B‖ of the weights of two models after matching, as a share of ‖A − B‖: over all weights, over those
of attention, and over those of feed-forward blocks. vit, bert and gpt2 were trained independently; sentiment are
fine-tunes of MiniLM. Where "all axes" rotates the residual stream (vit and gpt2), all three models are in its frame.

- Other implementations, written without symfuse: permutations of heads and of the units in each head; Git Re-Basin's
  weight matching, without and with the residual stream; OT fusion of everything, by exact (hard) and by entropic
  (soft) plans, whose maps of the stream are means.
- "change" is the largest difference between the outputs of A and A' on random inputs, relative to the largest output,
  over all pairs.
- Rotations keep the order of heads; permutations of heads may change it. A soft map shortens A: its distance does not
  measure how well models fit.
"""

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        pair = self.pair(part)
        source, anchor = pair.models
        for way in (*OURS, *self._peers(pair.name)):
            row = self.start(pair) | {"matching": way}
            if self.key(row) not in done:
                yield row | self._measured(way, source, anchor)

    def _peers(self, name: str) -> list[str]:
        left_out = self.options["models"][name].get("without", ())
        return [peer for peer in SHOWN if peer not in left_out]

    def _measured(self, way: str, source: Checkpoint, anchor: Checkpoint) -> Row:
        if way in PEERS:
            aligned, plain, alignment = aligned_by(way, source, anchor), source, None
        else:
            pair_ = matched(way, source, anchor)
            aligned, anchor, plain, alignment = pair_.source, pair_.anchor, pair_.plain, pair_.alignment
        check = symfuse.verify(source, aligned, alignment)
        after, before = symfuse.relate(aligned, anchor).distance, symfuse.relate(plain, anchor).distance
        shares = {part: _part(after, part) / _part(before, part) for part in PARTS}
        return shares | {"distance": after.euclidean, "change": check.worst, "exact": check.equal}

    def tables(self, rows: Sequence[Row]) -> str:
        parts = []
        for name in self.options["models"]:
            lines = []
            for way in (*OURS, *self._peers(name)):
                own = [row for row in rows if (row["models"], row["matching"]) == (name, way)]
                shares = [mean_error([row[part] for row in own], 1, 100) for part in PARTS]
                lines.append([way, *shares, f"{max(row['change'] for row in own):.0e}"])
            parts.append(f"{name}, distance in percent:\n\n{table(['matching', *PARTS, 'change'], lines)}")
        return "\n\n".join(parts)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        compared = {
            "matching attention and feed-forward blocks brings models nearer": ("all", "both", None),
            "rotations bring attention nearer than permutations of heads and their units": (
                "attention", "attention", "per-head permutation",
            ),
            "with neurons, nearer than Git Re-Basin that keeps the residual stream": (
                "all", "both", "Git Re-Basin, residual kept",
            ),
            "with neurons, nearer than Git Re-Basin that moves the residual stream": ("all", "both", "Git Re-Basin"),
        }  # fmt: skip
        claims = [
            self._nearer(rows, name, says, *which)
            for says, which in compared.items()
            for name in self.options["models"]
        ]
        exact, soft = (
            [row for row in rows if row["matching"].startswith("OT") is transport and row["matching"] != "OT, hard"]
            for transport in (False, True)
        )
        most, least = max(row["change"] for row in exact), min((row["change"] for row in soft), default=None)
        says = "matchings by rotations and permutations leave the function"
        here = f"outputs change by {most:.0e} of the largest at most ({len(exact)} rows)"
        claims.append(Claim(says, here, all(row["exact"] for row in exact)))
        if least is not None:
            here = f"outputs change by {least:.2f} of the largest at least ({len(soft)} rows)"
            claims.append(Claim("optimal transport does not", here, not any(row["exact"] for row in soft)))
        return claims

    def _nearer(self, rows: Sequence[Row], name: str, says: str, part: str, way: str, peer: str | None) -> Claim:
        """peer: None: than the models are without matching."""
        here = self.values(rows, part, models=name, matching=way)
        there = self.values(rows, part, models=name, matching=peer) if peer else [1.0] * len(here)
        text = f"{name}: {mean_error(here, 2, 100)} against {mean_error(there, 2, 100)} % of the distance"
        return Claim(says, text, better(gains(there, here)))

    def draw(self, rows: Sequence[Row], file: Path) -> None:
        names, ways = list(self.options["models"]), (*OURS, *SHOWN)
        with figure(file, columns=len(names), size=(1.9, 2.6)) as axes:
            for one, name in zip(axes[0], names, strict=True):
                for i, (part, colour) in enumerate(zip(PARTS, COLOURS, strict=False)):
                    shares = [self.values(rows, part, models=name, matching=way) for way in ways]
                    at = [number + (i - 1) / 4 for number, of_part in enumerate(shares) if of_part]
                    one.barh(
                        at, [100 * fmean(of_part) for of_part in shares if of_part], 1 / 4, color=colour, label=part
                    )
                one.set(title=name, xlabel="% of the distance", yticks=range(len(ways)), yticklabels=[])
                one.set_ylim(len(ways) - 0.5, -0.5)
            axes[0][0].set_yticklabels(ways)
            legend(axes)


def _part(distance: Distance, part: str) -> float:
    """Of the tensors on whose innermost axis the part acts."""
    axes = PARTS[part]
    return sum(gap.squared for axis, gap in distance.by("axis").items() if axes is None or axis in axes) ** 0.5
