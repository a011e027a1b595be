"""What is known of a pair of models, as numbers: by axis and layer, by tensor, and of the whole pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

UNTOUCHED = 1e-4  # |D| / |B| of a matrix, which rounding explains
NEURONS = "neurons"  # of `Units.kind`: units that are only reordered, flipped and scaled one by one


@dataclass(frozen=True)
class Units:
    """One axis in one layer. kind: "neurons", "inside" of heads or planes, or "stream".

    cosine: the 5 %, 50 % and 95 % quantiles, over units, of the mean over matrices of the cosines of both models' rows
    of the unit. margin: the same quantiles of how much that is above the largest cosine with another unit. agreement:
    of matchings from disjoint tensors, tr(GᵀH) / n of their elements, the least of all pairs: 1 if they are the same,
    about 0 if they have nothing in common. None where there is only one tensor, or it was not computed.
    """

    axis: str
    layer: int
    kind: str
    units: int
    cosine: tuple[float, float, float]
    margin: tuple[float, float, float] | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class Change:
    """What differs in one matrix, D = A − B with A the aligned source. layer: −1 outside of layers.

    relative: |D| / |B|, or |D| / |A| where B is zero. rank: the least number of singular directions with 99 % of |D|²,
    of `full`. edge: the largest eigenvalue of DᵀD over that of noise of this size, where the spectrum of Marchenko and
    Pastur (1967) ends: about 1 for rounding errors. zeros: the share of entries that are nearly 0 in A and not in B
    (negative: in B and not in A).
    """

    tensor: str
    layer: int
    numbers: int
    relative: float
    rank: int
    full: int
    edge: float
    zeros: float


@dataclass(frozen=True)
class Evidence:
    """The evidence of a pair. placed: how it was compared, "in place" or "matched". units, changes: as compared.

    in_place: the median cosine of units by their index, before anything is matched. vectors: |D| / |B| over biases and
    gains. equal: the share of numbers that are equal bit by bit in place. grid: bits of the grid that the matrices of
    each model lie on in the file, (source, anchor); None for none. fixed, log10_p: how many neurons are matched to
    those of their own index in place, and the bound of the probability of so many for models that were trained apart.
    layers: of the source → of the anchor, where their numbers differ; widths: axes whose sizes differ, with both sizes.
    """

    placed: str
    units: tuple[Units, ...]
    changes: tuple[Change, ...]
    in_place: float
    vectors: float = 0.0
    equal: float = 0.0
    grid: tuple[int | None, int | None] = (None, None)
    fixed: int = 0
    log10_p: float = 0.0
    layers: tuple[int, ...] | None = None
    depths: tuple[int, int] | None = None
    widths: tuple[tuple[str, int, int], ...] = ()
    compared: str = ""

    def of_kind(self, kind: str) -> list[Units]:
        return [one for one in self.units if one.kind == kind]

    @property
    def judged(self) -> list[Units]:
        """The units that a verdict is based on: neurons, or where a model has none those inside of heads."""
        return self.of_kind(NEURONS) or self.of_kind("inside") or list(self.units)

    @property
    def cosine(self) -> float:
        """The median over layers of the median cosine of judged units."""
        return median([one.cosine[1] for one in self.judged]) if self.judged else math.nan

    @property
    def best(self) -> float:
        """The largest median cosine of a layer: of a partial copy that layer which is a copy."""
        return max((one.cosine[1] for one in self.judged), default=math.nan)

    @property
    def worst(self) -> float:
        """The least median cosine of any units: below `cosine` where only some axes are in another basis."""
        return min((one.cosine[1] for one in self.units), default=math.nan)

    @property
    def low(self) -> float:
        """The least 5 % quantile of a layer."""
        return min((one.cosine[0] for one in self.judged), default=math.nan)

    @property
    def margin(self) -> float:
        """The median over layers of the median margin of neurons."""
        margins = [one.margin[1] for one in self.judged if one.margin is not None]
        return median(margins) if margins else math.nan

    @property
    def agreement(self) -> float:
        """The median over layers of the agreement of matchings of judged units from disjoint tensors."""
        found = [one.agreement for one in self.judged if one.agreement is not None]
        return median(found) if found else math.nan

    @property
    def relative(self) -> float:
        """|D| / |B| over all matrices."""
        return self.share(self.changes)

    @staticmethod
    def share(changes: Sequence[Change]) -> float:
        """The root mean square of relative changes, each matrix with the weight of its size."""
        numbers = sum(one.numbers for one in changes)
        return math.sqrt(sum(one.numbers * one.relative**2 for one in changes) / numbers) if numbers else 0.0

    def summary(self) -> dict[str, float]:
        """What a verdict is decided by, in one row."""
        moved = [one for one in self.changes if one.relative > UNTOUCHED]
        sizes = sorted(one.relative for one in self.changes)
        return {
            "cosine": self.cosine, "best": self.best, "low": self.low, "worst": self.worst, "margin": self.margin,
            "agreement": self.agreement,
            "in_place": self.in_place, "relative": self.relative, "vectors": self.vectors, "equal": self.equal,
            "changed": len(moved) / len(self.changes) if self.changes else 0.0,
            "least_change": sizes[0] if sizes else 0.0, "most_change": sizes[-1] if sizes else 0.0,
            "edge": median([one.edge for one in moved]) if moved else math.nan,
            "rank": median([one.rank / one.full for one in moved]) if moved else math.nan,
            "zeros": median([one.zeros for one in self.changes]) if self.changes else 0.0,
            "log10_p": self.log10_p,
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As JSON: no number is NaN, None stands for one that there is not."""
        data = asdict(self) | {"summary": self.summary()}
        finite: dict[str, Any] = _finite(data)
        return finite


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
