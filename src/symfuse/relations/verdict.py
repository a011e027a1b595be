"""From evidence to a verdict. Thresholds were chosen on one half of a benchmark (docs/relate.md), by the rows of
experiments/data/small/relations.json whose `half` is "tune"."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from symfuse.relations.evidence import UNTOUCHED, Change, Evidence

SAME_WEIGHTS, SAME_FUNCTION, FINE_TUNE = "same weights", "same function", "fine-tune"
QUANTISED, PRUNED, CUT, WIDTH = "quantised copy", "pruned copy", "cut in layers", "of another width"
APART, UNRELATED, OTHER = "trained apart", "unrelated", "not comparable"
RELATED = (SAME_WEIGHTS, SAME_FUNCTION, FINE_TUNE, QUANTISED, PRUNED, CUT, WIDTH)

COSINE = 0.64  # of units, above which one model comes from the other: half-way, of 0.47 and 0.81 when tuning
SURE = 0.90  # of units in place, above which nothing has to be matched
CHANCE = 0.05  # agreement of matchings from disjoint tensors, up to which units have nothing in common
MUCH = 0.8  # of |D| in place, that matching has to leave less of for two models to be in different bases
ROUNDING = 1e-5  # |D| / |B| that rounding to float32 explains, after moving
ALL = 0.9  # of the matrices: what differs in so many, differs in all
NOISE = 2.0  # `Change.edge`, up to which a difference is noise, as of rounding: half-way, of 1.71 and 2.28
ZEROS = 0.13  # share of entries that are nearly 0 in one model alone: half-way, of 0.02 and 0.24
LOW_RANK = 0.34  # `Change.rank` over its largest, up to which a difference is called low-rank


@dataclass(frozen=True)
class Verdict:
    """kind: one of the words above. moved: whether the weights are in another basis, so that only matching shows it;
    None if that does not matter. details: of a fine-tune "low-rank (rank 4)", "only layers 3"; of all what differs in
    words. similarity: the median cosine of matched units."""

    kind: str
    moved: bool | None
    details: tuple[str, ...]
    similarity: float

    @property
    def related(self) -> bool:
        """Whether one model comes from the other, or both from a third."""
        return self.kind in RELATED

    def __str__(self) -> str:
        moved = ", moved" if self.moved else ""
        return f"{self.kind}{moved}" + (f": {'; '.join(self.details)}" if self.details else "")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "details": list(self.details), "related": self.related}


def decide(e: Evidence) -> Verdict:
    """The verdict for two models of one family."""
    moved = e.placed == "matched"
    if not e.cosine >= COSINE and not _same(e):
        shared = e.agreement > CHANCE
        return Verdict(APART if shared else UNRELATED, None, _apart(e), e.cosine)
    kind, details = _kind(e)
    if e.depths is not None and e.layers is not None:
        deep = "source" if e.depths[0] > e.depths[1] else "anchor"
        layers = f"layers {', '.join(map(str, e.layers))} of {max(e.depths)} of the {deep}"
        return Verdict(CUT, moved, (layers, _besides(kind, details)), e.cosine)
    if e.widths:
        sizes = ", ".join(f"{axis} {one} and {other}" for axis, one, other in e.widths)
        return Verdict(WIDTH, moved, (sizes, _besides(kind, details)), e.cosine)
    return Verdict(kind, moved, details, e.cosine)


def _besides(kind: str, details: tuple[str, ...]) -> str:
    return f"otherwise {kind}" + (f" ({'; '.join(details)})" if details else "")


def _apart(e: Evidence) -> tuple[str, ...]:
    return (f"units are alike to a cosine of {e.cosine:.2f}",)


def _same(e: Evidence) -> bool:
    """Also of models of zeros, whose units have no cosine."""
    return e.placed == "in place" and e.equal == 1.0 and all(one.relative <= UNTOUCHED for one in e.changes)


def _kind(e: Evidence) -> tuple[str, tuple[str, ...]]:
    changed = [one for one in e.changes if one.relative > UNTOUCHED]
    if _same(e):
        return SAME_WEIGHTS, ()
    if e.relative <= ROUNDING and e.vectors <= ROUNDING:
        return SAME_FUNCTION, ()
    if (bits := _bits(e)) is not None:
        return QUANTISED, (bits,)
    summary = e.summary()
    if abs(summary["zeros"]) >= ZEROS:
        which = "source" if summary["zeros"] > 0 else "anchor"
        return PRUNED, (f"{abs(summary['zeros']):.0%} of the entries of the {which} alone are 0",)
    if summary["changed"] >= ALL and summary["edge"] <= NOISE:
        return QUANTISED, (f"noise of {e.relative:.2%} in all matrices",)
    return FINE_TUNE, tuple(_of_tuning(e, changed))


def _bits(e: Evidence) -> str | None:
    one, other = e.grid
    if one == other:
        return None
    which, bits = ("source", one) if one is not None else ("anchor", other)
    return f"the {which} lies on a grid of {bits} bits"


def _of_tuning(e: Evidence, changed: list[Change]) -> list[str]:
    """What is said of a fine-tune: low-rank, partial, and how far it is."""
    out = []
    ranks = [one.rank / one.full for one in changed]
    if ranks and sorted(ranks)[len(ranks) // 2] <= LOW_RANK:
        out.append(f"low-rank: at most {max(one.rank for one in changed)} of {max(one.full for one in changed)}")
    layers, touched = ({one.layer for one in some if one.layer >= 0} for some in (e.changes, changed))
    if touched < layers:
        out.append(f"only layers {', '.join(map(str, sorted(touched))) or 'none'} changed")
    if len(changed) < len(e.changes):
        out.append(f"{len(e.changes) - len(changed)} of {len(e.changes)} matrices unchanged")
    return [*out, f"{e.relative:.2%} of the norm differs"]
