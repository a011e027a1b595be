"""The loss barrier: the loss along the straight line between two models, before and after alignment.

The path is W(λ) = λ A + (1 − λ) B, so λ = 0 is the anchor B. Of both definitions in use the first is 0 for a path that
is a chord, and the second compares with the mean of the endpoints (Frankle et al. 2020, Section 2; Verma & Elbayad
2024, Eq. 6; both are equal if the endpoints' losses are).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symfuse.errors import CheckpointError, OptionError
from symfuse.evaluate.task import Loss, Score, describe, measure
from symfuse.evaluate.weights import Build, WeightSpace, name_of, open_space
from symfuse.io import Checkpoint

Source = Checkpoint | nn.Module
PLAIN = "none"


@dataclass(frozen=True)
class Point:
    """at: λ in [0, 1]."""

    at: float
    score: Score


@dataclass(frozen=True)
class Curve:
    """Scores along one path, by rising λ; distance: Euclidean, between its ends."""

    name: str
    points: tuple[Point, ...]
    distance: float

    @property
    def ends(self) -> tuple[float, float]:
        """The losses of B (λ = 0) and of A (λ = 1)."""
        return self.points[0].score.loss, self.points[-1].score.loss

    def excess(self, point: Point) -> float:
        """The loss above the chord between the endpoints' losses."""
        start, end = self.ends
        return point.score.loss - (start + point.at * (end - start))

    @property
    def peak(self) -> Point:
        """The point that lies highest above the chord; an endpoint if none lies above it."""
        return max(self.points, key=self.excess)

    @property
    def barrier(self) -> float:
        """max over λ of L(λ) − (λ L(A) + (1 − λ) L(B)), in nats; at least 0."""
        return self.excess(self.peak)

    @property
    def barrier_over_mean(self) -> float:
        """max over λ of L(λ) − ½ (L(A) + L(B))."""
        return max(point.score.loss for point in self.points) - sum(self.ends) / 2

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "points": [{"at": p.at, **p.score.to_json()} for p in self.points],
            "distance": self.distance,
            "barrier": self.barrier,
            "barrier over mean": self.barrier_over_mean,
            "at": self.peak.at,
        }


@dataclass(frozen=True)
class Barrier:
    """Curves over the same batches. task: what was evaluated. baselines: for a curve what to compare it with: the plain
    one in its own parametrisation, then the plain one of the models as they are."""

    source: str
    anchor: str
    task: Mapping[str, Any]
    curves: Mapping[str, Curve]
    baselines: Mapping[str, tuple[str, ...]]

    def share(self, name: str, baseline: str) -> float | None:
        """What is left of a baseline's barrier; None if that has none."""
        plain = self.curves[baseline].barrier
        return self.curves[name].barrier / plain if plain > 0 else None

    def to_json(self) -> dict[str, Any]:
        curves = [
            curve.to_json() | {"left of": {base: self.share(name, base) for base in self.baselines.get(name, ())}}
            for name, curve in self.curves.items()
        ]
        return {
            "kind": "barrier",
            "source": self.source,
            "anchor": self.anchor,
            "task": dict(self.task),
            "curves": curves,
        }


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
    progress: Callable[[str, Point, int], None] | None = None,
) -> Barrier:
    """The loss along the path of each pair (A, B), named; all on the same batches, endpoints measured.

    baselines: as in `Barrier`; by default the curve "none", if there is one, for all others. points: evenly spaced,
    endpoints among them. refine: how often the intervals beside the highest point are halved. build: makes the
    module, for models that `transformers` does not have. progress: called with the curve, the point that is done, and
    the number of all points. One module is in memory; A and B are read from their files at each point.
    """
    if points < 3 or refine < 0:
        raise OptionError(
            f"points is {points} and refine {refine}; a path needs 3 points at least, and refine is 0 or more"
        )
    if not pairs:
        raise OptionError("a barrier needs a pair of models")
    if baselines is None:
        baselines = {name: (PLAIN,) for name in pairs if name != PLAIN and PLAIN in pairs}
    total = len(pairs) * (points + 2 * refine)
    curves = {}
    for name, (a, b) in pairs.items():
        with tempfile.TemporaryDirectory(prefix="symfuse-") as scratch:
            space = open_space([b, a], [name_of(b), name_of(a)], loss, Path(scratch), build, dtype)
            report = None if progress is None else _reporter(progress, name, total)
            found = _path(space, loss, points, refine, report)
            curves[name] = Curve(name, tuple(found), space.gram().item() ** 0.5)
    first, last = names or tuple(map(name_of, next(iter(pairs.values()))))
    return Barrier(first, last, describe(loss), curves, baselines)


def _path(
    space: WeightSpace, loss: Loss, points: int, refine: int, report: Callable[[Point], None] | None
) -> list[Point]:
    def at(place: float) -> Point:
        point = Point(place, measure(loss, space.set([1 - place, place])))
        if not math.isfinite(point.score.loss):
            raise CheckpointError(
                f"{' and '.join(space.names)}: the loss is {point.score.loss} at λ = {place:g}, so there is no "
                "barrier; try dtype float64 if numbers overflow, else look at the data"
            )
        if report is not None:
            report(point)
        return point

    found = [at(i / (points - 1)) for i in range(points)]
    for _ in range(refine):
        highest = found.index(Curve("", tuple(found), 0.0).peak)
        beside = [(found[i].at + found[i + 1].at) / 2 for i in (highest - 1, highest) if 0 <= i < len(found) - 1]
        found = sorted([*found, *map(at, beside)], key=lambda point: point.at)
    return found


def _reporter(progress: Callable[[str, Point, int], None], name: str, total: int) -> Callable[[Point], None]:
    return lambda point: progress(name, point, total)
