"""The loss barrier: the loss along the straight line between two models, before and after alignment.

The path is W(λ) = λ A + (1 − λ) B, so λ = 0 is the anchor B. There are two definitions of the barrier: the largest rise
above the chord between the endpoints' losses, and that above their mean (Frankle et al. 2020, Section 2; Verma &
Elbayad 2024, Eq. 6). They agree if the endpoints have equal losses.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symfuse.arguments import checked
from symfuse.errors import CheckpointError, OptionError
from symfuse.evaluation.renewal import renew_statistics
from symfuse.evaluation.task import Batch, Loss, Score, describe, measure
from symfuse.evaluation.weights import Build, WeightSpace, name_of, open_space
from symfuse.io import Checkpoint
from symfuse.messages import SCHEMA, shown

Source = Checkpoint | nn.Module
PLAIN = "none"

# Losses are exact up to this many eps of the dtype, relative to the largest. A loss is the mean of sums over batches:
# each sum is rounded in the dtype, a few times as torch adds in pairs; their mean is exact. The weights and the forward
# pass are rounded too, alike for all tokens. Between exact copies the largest difference seen was 1.2 eps.
_ROUNDING = 8

# The most new points of one round of refinement: on both sides of two maxima.
_BESIDE = 4


@dataclass(frozen=True)
class Point:
    """at: λ in [0, 1]."""

    at: float
    score: Score


@dataclass(frozen=True)
class Curve:
    """Scores along one path, by rising λ; distance: Euclidean, between its ends; dtype: what they were computed in.
    inexact: the variants of A's alignment, if A computes another function at this end."""

    name: str
    points: tuple[Point, ...]
    distance: float
    dtype: torch.dtype = torch.float32
    inexact: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[float, float]:
        """The losses of B (λ = 0) and of A (λ = 1)."""
        return self.points[0].score.loss, self.points[-1].score.loss

    def excess(self, point: Point) -> float:
        """The loss above the chord between the endpoints' losses; exactly 0 at an endpoint."""
        start, end = self.ends
        rise = end - start  # counted from the nearer end, so that both lie on the chord
        chord = start + point.at * rise if point.at < 0.5 else end - (1 - point.at) * rise
        return point.score.loss - chord

    @property
    def peak(self) -> Point:
        """The point that lies highest above the chord; an endpoint if none lies above it."""
        return max(self.points, key=self.excess)

    @property
    def peak_over_mean(self) -> Point:
        """The point of the highest loss."""
        return max(self.points, key=lambda point: point.score.loss)

    @property
    def barrier(self) -> float:
        """max over λ of L(λ) − (λ L(A) + (1 − λ) L(B)), in nats; at least 0."""
        return self.excess(self.peak)

    @property
    def barrier_over_mean(self) -> float:
        """max over λ of L(λ) − ½ (L(A) + L(B)); at least 0."""
        return self.peak_over_mean.score.loss - sum(self.ends) / 2

    @property
    def rounding(self) -> float:
        """A barrier up to this cannot be distinguished from rounding: 8 eps of the dtype times the largest loss in
        size. (Where logits are far larger than the loss, their rounding may exceed it.)"""
        return _ROUNDING * torch.finfo(self.dtype).eps * max(abs(point.score.loss) for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "points": [{"at": p.at, **p.score.to_dict()} for p in self.points],
            "distance": self.distance,
            "barrier": self.barrier,
            "barrier_over_mean": self.barrier_over_mean,
            "at": self.peak.at,
            "at_over_mean": self.peak_over_mean.at,
            "rounding": self.rounding,
            **({"inexact": list(self.inexact)} if self.inexact else {}),
        }


@dataclass(frozen=True)
class Barrier:
    """Curves over the same batches. task: what was evaluated. baselines: name of a curve → names of those that it is
    compared with: the unaligned one in the same frame, then that of the unchanged models. renewed: the number of
    batches from which the statistics of batch normalisation were recomputed at inner points; 0 where they were
    interpolated."""

    source: str
    anchor: str
    task: Mapping[str, Any]
    curves: Mapping[str, Curve]
    baselines: Mapping[str, tuple[str, ...]]
    renewed: int = 0

    def share(self, name: str, baseline: str) -> float | None:
        """The share of a baseline's barrier that remains; None if the baseline has none, or no more than the `rounding`
        of its losses."""
        plain = self.curves[baseline]
        return self.curves[name].barrier / plain.barrier if plain.barrier > plain.rounding else None

    __repr__, _repr_html_ = shown(
        lambda self: {
            "models": f"{self.source} to {self.anchor}",
            "task": str(self.task["task"]),
            **{f"barrier {name}": float(curve.barrier) for name, curve in self.curves.items()},
        }
    )

    def to_dict(self) -> dict[str, Any]:
        """As JSON: what `symfuse barrier --json` prints."""
        curves = [
            curve.to_dict() | {"left_of": {base: self.share(name, base) for base in self.baselines.get(name, ())}}
            for name, curve in self.curves.items()
        ]
        return {
            "kind": "barrier",
            "schema": SCHEMA,
            "source": self.source,
            "anchor": self.anchor,
            "task": dict(self.task),
            "curves": curves,
            **({"batch_statistics": f"taken anew from {self.renewed} batches at inner points"} if self.renewed else {}),
        }


@checked
def barrier(
    pairs: Mapping[str, tuple[Source, Source]],
    loss: Loss,
    *,
    baselines: Mapping[str, tuple[str, ...]] | None = None,
    names: tuple[str, str] | None = None,
    points: int = 11,
    refine: int = 2,
    build: Build | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
    renew: Iterable[Batch] | None = None,
    inexact: Mapping[str, tuple[str, ...]] | None = None,
    progress: Callable[[str, Point, int], None] | None = None,
) -> Barrier:
    """The loss along the path of each named pair (A, B), all on the same batches.

    baselines: as in `Barrier`; by default the curve "none", if there is one, for all others. points: evenly spaced,
    including the endpoints. refine: how often the intervals next to the highest points are halved: the point highest
    above the chord, and the point of the highest loss if that is another. build: makes the module, for models that
    `transformers` does not have. device: of the module (`open_space`). progress: called with the name of the curve, the
    finished point, and an upper bound of the number of all points, which at the last point is exact. renew: batches of
    module inputs from which the running statistics of batch normalisation are recomputed at the inner points; by
    default they are interpolated like weights, and the ends always keep their own. inexact: by pair, as in `Curve`. One
    module is in memory; A and B are read from their files at each point. Raises OptionError for arguments that make no
    sense, before anything is measured.
    """
    if baselines is None:
        baselines = {name: (PLAIN,) for name in pairs if name != PLAIN and PLAIN in pairs}
    _require_sense(pairs, loss, baselines, points, refine)
    batches = None if renew is None else list(renew)
    renewed = False
    curves: dict[str, Curve] = {}
    for name, (a, b) in pairs.items():
        others = sum(len(curve.points) for curve in curves.values())
        others += (len(pairs) - len(curves) - 1) * (points + _BESIDE * refine)
        with tempfile.TemporaryDirectory(prefix="symfuse-") as scratch:
            space = open_space([b, a], [name_of(b), name_of(a)], loss, Path(scratch), build, dtype, device)
            if batches is not None:
                # Raises if it cannot be done at all.
                renewed |= bool(renew_statistics(space.set([1.0, 0.0]), batches[:1]))
            report = None if progress is None else _reporter(progress, name, others)
            result = _path(space, loss, points, refine, batches, report)
            variants = (inexact or {}).get(name, ())
            curves[name] = Curve(name, tuple(result), space.gram().item() ** 0.5, dtype, variants)
    first, last = names or tuple(map(name_of, next(iter(pairs.values()))))
    return Barrier(first, last, describe(loss), curves, baselines, len(batches) if batches and renewed else 0)


def _require_sense(
    pairs: Mapping[str, object], loss: object, baselines: Mapping[str, tuple[str, ...]], points: object, refine: object
) -> None:
    """OptionError for arguments of `barrier` that make no sense."""
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= low for n, low in ((points, 3), (refine, 0)))
    if not whole:
        raise OptionError(
            f"points is {points} and refine {refine}; a path needs 3 points at least, and refine is 0 or more, both "
            "whole numbers"
        )
    if not pairs:
        raise OptionError("a barrier needs a pair of models")
    if not callable(loss):
        raise OptionError(
            f"the loss is {loss!r}; expected a task (symfuse.task), or a callable from a module to a number"
        )
    named = {*baselines, *(base for bases in baselines.values() for base in bases)}
    if unknown := sorted(map(str, named - pairs.keys())):
        raise OptionError(f"baselines: there is no curve {unknown[0]!r}; there are {', '.join(map(repr, pairs))}")


def _path(
    space: WeightSpace,
    loss: Loss,
    points: int,
    refine: int,
    renew: Sequence[Batch] | None,
    report: Callable[[Point, int], None] | None,
) -> list[Point]:
    """The points by rising λ. report: called with each point, and an upper bound of their number."""
    result: list[Point] = []
    places = [i / (points - 1) for i in range(points)]
    for rounds in range(refine, -1, -1):  # that are still to come
        most = len(result) + len(places) + _BESIDE * rounds
        for place in places:
            result.append(_point(space, loss, place, renew))
            if report is not None:
                report(result[-1], most)
        result.sort(key=lambda point: point.at)
        places = _beside(result)
    return result


def _point(space: WeightSpace, loss: Loss, place: float, renew: Sequence[Batch] | None) -> Point:
    module = space.set([1 - place, place])
    if renew is not None and 0 < place < 1:
        renew_statistics(module, renew)
    point = Point(place, measure(loss, module))
    if not math.isfinite(point.score.loss):
        raise CheckpointError(
            f"{' and '.join(space.names)}: the loss is {point.score.loss} at λ = {place:g}, so there is no barrier; "
            "try dtype float64 if numbers overflow, else look at the data"
        )
    return point


def _beside(result: Sequence[Point]) -> list[float]:
    """The midpoints of the intervals next to the maxima of both definitions."""
    curve = Curve("", tuple(result), 0.0)
    tops = {result.index(curve.peak), result.index(curve.peak_over_mean)}
    starts = sorted({i for top in tops for i in (top - 1, top) if 0 <= i < len(result) - 1})
    return [(result[i].at + result[i + 1].at) / 2 for i in starts]


def _reporter(progress: Callable[[str, Point, int], None], name: str, others: int) -> Callable[[Point, int], None]:
    """others: how many points the other curves have, at most."""
    return lambda point, most: progress(name, point, others + most)
