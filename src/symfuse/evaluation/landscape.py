"""The loss on the plane through three models in weight space (Garipov et al. 2018; Zhang et al. 2025, Figure 5).

Axes by Gram–Schmidt: the origin is the first model, the second lies on the first axis, the third in the upper half.
Every point of the plane is an affine combination of the three, so no direction is ever stored.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.arguments import checked
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, OutputError
from symfuse.evaluation.identity import identity
from symfuse.evaluation.task import Loss, Score, describe, measure
from symfuse.evaluation.weights import Build, WeightSpace, open_space
from symfuse.files import regular
from symfuse.io.sources import Source, runnable
from symfuse.io.target import write_text
from symfuse.messages import SCHEMA

# A third model this near to the line of the others, relative to its distance, spans no plane with them.
_COLLINEAR = 1e-6

# Beyond this margin, in extents of the models, there is nothing to see but overflow.
_WIDEST = 100


@dataclass(frozen=True)
class Plane:
    """corners: (x, y) of the three models, in Euclidean distance in weight space."""

    corners: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]

    @classmethod
    def of(cls, gram: Tensor) -> Plane:
        """From the inner products of the second and the third model, seen from the first; float64 [2, 2].

        IncompatibleError if the three lie on a line, CheckpointError if a distance overflows.
        """
        if not gram.isfinite().all():
            raise CheckpointError("the models are too far apart for numbers in float64; look at their weights")
        width = gram[0, 0].sqrt().item()
        along = (gram[0, 1] / gram[0, 0].sqrt()).item() if width else 0.0
        up = (gram[1, 1] - along * along).clamp_min(0).sqrt().item()
        if not width or up <= _COLLINEAR * gram[1, 1].sqrt().item():
            raise IncompatibleError("the three models lie on a line in weight space (are two of them equal?); no plane")
        return cls(((0.0, 0.0), (width, 0.0), (along, up)))

    def coefficients(self, x: float, y: float) -> tuple[float, float, float]:
        """The weights of the three models, summing to 1, whose combination lies at (x, y); a corner's is exactly 1."""
        if (x, y) in self.corners:
            first, second, third = (float((x, y) == corner) for corner in self.corners)
            return first, second, third
        (width, _), (along, up) = self.corners[1:]
        third = y / up
        second = (x - third * along) / width
        return 1 - second - third, second, third


@dataclass(frozen=True)
class Landscape:
    """scores[i][j] at (xs[j], ys[i]); corners: the three models by name, at their places, with their own scores."""

    names: tuple[str, str, str]
    plane: Plane
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    scores: tuple[tuple[Score, ...], ...]
    corners: tuple[Score, Score, Score]
    task: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As JSON: what `symfuse landscape --json` prints."""
        models = [
            {"name": name, "x": x, "y": y, **score.to_dict()}
            for name, (x, y), score in zip(self.names, self.plane.corners, self.corners, strict=True)
        ]
        return {
            "kind": "landscape",
            "schema": SCHEMA,
            "task": dict(self.task),
            "models": models,
            "xs": list(self.xs),
            "ys": list(self.ys),
            "loss": [[score.loss for score in row] for row in self.scores],
            "metrics": {
                name: [[score.metrics[name] for score in row] for row in self.scores]
                for name in self.corners[0].metrics
            },
        }


@checked
def landscape(
    models: Mapping[str, Source],
    loss: Loss,
    *,
    steps: int = 21,
    margin: float = 0.25,
    journal: Path | None = None,
    build: Build | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Landscape:
    """The loss on the plane through three named models, such as `{"A": a, "A aligned": g(a), "B": b}`: on a grid of
    steps × steps points, `margin` of the models' extent around them.

    loss, build, dtype: as in `symfuse.barrier`.
    journal: a file in which every point is kept as it is done; with one, a run that was stopped goes on where it
    was. OutputError if the file is of another grid, of models with other weights, of other data or another loss
    (`symfuse.evaluation.identity` defines which losses are equal); all weights are read once for that. device: where
    the module is run (`open_space`). progress: called with how many points are done, and of how many.
    """
    if len(models) != 3:
        raise OptionError(f"a plane goes through three models; {len(models)} given")
    if steps < 2 or not 0 <= margin <= _WIDEST:
        raise OptionError(
            f"steps is {steps} and margin {margin}; a grid needs 2 steps at least and a margin of 0 to {_WIDEST}"
        )
    names = tuple(models)
    with tempfile.TemporaryDirectory(prefix="symfuse-") as scratch:
        space = open_space(
            [runnable(model) for model in models.values()], names, loss, Path(scratch), build, dtype, device
        )
        plane = Plane.of(space.gram())
        xs, ys = (_ticks([corner[i] for corner in plane.corners], steps, margin) for i in (0, 1))
        places = [*plane.corners, *((x, y) for y in ys for x in xs)]
        task = describe(loss)
        about = {"models": names, "places": places, "task": task, "dtype": str(dtype)}
        done = _Journal(journal, about if journal is None else about | _identities(space, loss))
        for number, (x, y) in enumerate(places):
            if number not in done.scores:
                score = measure(loss, space.set(plane.coefficients(x, y)))
                if not math.isfinite(score.loss):
                    raise CheckpointError(
                        f"the loss is {score.loss} at ({x:.4g}, {y:.4g}) of the plane through {', '.join(names)}; take "
                        "a smaller margin, try dtype float64 if numbers overflow, else look at the data"
                    )
                done.add(number, score)
            if progress is not None:
                progress(number + 1, len(places))
    scores = [done.scores[number] for number in range(len(places))]
    first, second, third, *grid = scores
    rows = tuple(tuple(grid[i * steps : (i + 1) * steps]) for i in range(steps))
    return Landscape((names[0], names[1], names[2]), plane, xs, ys, rows, (first, second, third), task)


def _ticks(corners: Sequence[float], steps: int, margin: float) -> tuple[float, ...]:
    low, high = min(corners), max(corners)
    around = margin * (high - low)
    return tuple(torch.linspace(low - around, high + around, steps, dtype=torch.float64).tolist())


def _identities(space: WeightSpace, loss: Loss) -> dict[str, Any]:
    """Identities of the models and of the loss, beyond their names."""
    module = space.module
    return {
        "module": identity([repr(module), str(getattr(module, "config", None))]),
        "weights": [identity(model) for model in space.models],
        "loss": identity(loss),
    }


class _Journal:
    """Scores by number; in a file, if there is one: a head line with models, grid and loss, then a line for each."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self.path = path
        self.scores: dict[int, Score] = {}
        head = json.dumps(about, sort_keys=True)
        if path is None:
            return
        try:
            first, *points = (regular(path).read_text("utf-8") if path.exists() else "").split("\n")
            points = points[:-1]  # what follows the last newline was cut off
            if (first or points) and first != head:
                raise OutputError(
                    f"{path} is of other models, data or grid, or of another loss; remove it to start anew"
                )
            for line, text in enumerate(points, 2):
                self._take(line, text, len(about["places"]))
            write_text(path, "\n".join([head, *points, ""]), "the journal of this landscape")
        except (OSError, ValueError) as error:  # of bad UTF-8
            raise OutputError(f"{path}: cannot be kept as the journal of this landscape ({error})") from error

    def _take(self, line: int, text: str, count: int) -> None:
        """The point of a line, as `add` writes them; OutputError if it is none of so many."""
        try:
            number, score = _read_point(text, count)
            if score.metrics.keys() != next(iter(self.scores.values()), score).metrics.keys():
                raise ValueError("it has other metrics than the lines before")
        except (ValueError, RecursionError) as error:
            raise OutputError(
                f"{self.path}, line {line}: no point of this landscape ({error}); remove the file to start anew"
            ) from error
        self.scores[number] = score

    def add(self, number: int, score: Score) -> None:
        self.scores[number] = score
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([number, score.to_dict()]) + "\n")


def _read_point(text: str, count: int) -> tuple[int, Score]:
    """The number, from 0 to below `count`, and the score of a line of a journal; ValueError if they are none."""
    data = json.loads(text)
    if not (isinstance(data, list) and len(data) == 2 and type(data[0]) is int and 0 <= data[0] < count):
        raise ValueError(f"expected the number of a point, 0 to {count - 1}, and its score")
    number, score = data
    if not isinstance(score, dict) or score.keys() != Score(0.0).to_dict().keys():
        raise ValueError("expected a score of loss, metrics and count")
    loss, metrics, of = score["loss"], score["metrics"], score["count"]
    if type(loss) not in (int, float) or not math.isfinite(loss):
        raise ValueError(f"the loss is {loss!r}, no finite number")
    if not isinstance(metrics, dict) or not all(type(value) in (int, float) for value in metrics.values()):
        raise ValueError(f"the metrics are {metrics!r}, no numbers by name")
    if type(of) is not int or of < 0:
        raise ValueError(f"the count is {of!r}, no number from 0 on")
    return number, Score(float(loss), metrics, of)
