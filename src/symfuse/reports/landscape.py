"""The landscape: its contour lines, and its chart (see `charts`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from symfuse.reports.charts import Run, Spec, number, ramp, spec_of
from symfuse.reports.content import metric_titles, short

KEYS = "ABC"  # the models of a landscape
_LEVELS = 9
# Labels closer to each other, or to a model, than this share of the picture would overlap.
_APART = 0.07


@dataclass(frozen=True)
class Line:
    """A line of equal loss, as points in the plane. is_low: whether its level is in the lower half of the colours."""

    level: float
    points: tuple[tuple[float, float], ...]
    is_low: bool

    @property
    def middle(self) -> tuple[float, float]:
        return self.points[len(self.points) // 2]


def losses(landscape: Mapping[str, Any]) -> list[float]:
    """All finite losses, of the grid and of the models."""
    result = [*(loss for row in landscape["loss"] for loss in row), *(model["loss"] for model in landscape["models"])]
    return [loss for loss in result if math.isfinite(loss)]


def is_wide(result: Sequence[float]) -> bool:
    """Whether losses span such a range that a logarithmic scale is needed to show the minimum."""
    return bool(result) and min(result) > 0 and max(result) > 5 * min(result)


def levels(result: Sequence[float]) -> list[float]:
    """Round losses at which to draw lines: in equal steps, or in equal ratios on a logarithmic scale."""
    if not result or min(result) == max(result):
        return []
    low, high = min(result), max(result)
    raw = (np.geomspace if is_wide(result) else np.linspace)(low, high, _LEVELS + 2)[1:-1].tolist()
    digits = 2 + max(0, math.ceil(math.log10(max(abs(low), abs(high)) / (high - low))))
    return sorted({level for one in raw if low < (level := float(f"{one:.{digits}g}")) < high})


def contour_lines(landscape: Mapping[str, Any]) -> list[Line]:
    """Lines of equal loss over the grid of a landscape run, without losses that are not finite."""
    from contourpy import contour_generator

    grid = np.ma.masked_invalid(np.array(landscape["loss"], dtype=np.float64))
    drawn = levels(losses(landscape))
    if grid.count() == 0:
        return []
    make = contour_generator(landscape["xs"], landscape["ys"], grid)
    return [
        Line(level, tuple(map(tuple, np.asarray(points).tolist())), 2 * i < len(drawn))
        for i, level in enumerate(drawn)
        for points in make.lines(level)
    ]


def labelled(lines: Sequence[Line], landscape: Mapping[str, Any]) -> list[Line]:
    """The longest line of each level, unless its label would overlap another label or a model."""
    wide = landscape["xs"][-1] - landscape["xs"][0], landscape["ys"][-1] - landscape["ys"][0]
    taken = [(model["x"], model["y"]) for model in landscape["models"]]
    result = []
    for level in sorted({line.level for line in lines}):
        longest = max((line for line in lines if line.level == level), key=lambda line: len(line.points))
        x, y = longest.middle
        if all(max(abs(x - u) / wide[0], abs(y - v) / wide[1]) > _APART for u, v in taken):
            taken.append((x, y))
            result.append(longest)
    return result


def landscape_chart(landscape: Run) -> Spec:
    """The losses on a plane as a heat map with contour lines and the models."""
    xs, ys = landscape["xs"], landscape["ys"]
    half = (xs[1] - xs[0]) / 2, (ys[1] - ys[0]) / 2
    cells = [
        {"x": x - half[0], "x2": x + half[0], "y": y - half[1], "y2": y + half[1], "at x": x, "at y": y, "loss": loss}
        for y, row in zip(ys, landscape["loss"], strict=True)
        for x, loss in zip(xs, row, strict=True)
        if math.isfinite(loss)
    ]
    metrics = metric_titles((one["metrics"] for one in landscape["models"]), taken=("model", "loss (nats)"))
    models = [
        {key: number(one[key]) for key in ("name", "x", "y", "loss")}
        | {"key": letter, "label": f"{letter}: {short(one['name'], 32)}"}
        | {f"m{i}": number(one["metrics"].get(metric)) for i, metric in enumerate(metrics)}
        for letter, one in zip(KEYS, landscape["models"], strict=False)
    ]
    kind = "log" if is_wide(losses(landscape)) else "linear"
    place = [{"field": "at x", "title": "x", "format": ".4g"}, {"field": "at y", "title": "y", "format": ".4g"}]
    loss = {"field": "loss", "title": "loss (nats)", "format": ".4f"}
    edge = [[xs[0] - half[0], xs[-1] + half[0]], [ys[0] - half[1], ys[-1] + half[1]]]
    x, y = (
        {"field": name, "type": "quantitative", "title": "distance", "scale": {"domain": domain, "nice": False}}
        for name, domain in zip("xy", edge, strict=True)
    )
    return spec_of(
        cells,
        usermeta={"aspect": (edge[1][1] - edge[1][0]) / (edge[0][1] - edge[0][0])},
        encoding={"x": x, "y": y},
        layer=[
            {
                "mark": {"type": "rect", "style": "field"},
                "encoding": {
                    "x2": {"field": "x2"},
                    "y2": {"field": "y2"},
                    "color": {"field": "loss", **ramp("loss (nats)", type=kind, nice=False)},
                    "tooltip": [*place, loss],
                },
            },
            *_contours(landscape),
            {
                "data": {"values": models},
                "layer": [
                    {
                        "mark": {"type": "point", "style": "model"},
                        "encoding": {
                            "tooltip": [
                                {"field": "name", "title": "model"},
                                loss,
                                *(
                                    {"field": f"m{i}", "title": title, "format": ".4f"}
                                    for i, title in enumerate(metrics.values())
                                ),
                            ]
                        },
                    },
                    *_model_labels(edge[0]),
                ],
            },
        ],
    )


def _contours(landscape: Run) -> list[Spec]:
    """Lines and their labels, in one colour for low losses and another for high ones."""
    lines = contour_lines(landscape)
    points = [
        {"line": i, "order": j, "x": x, "y": y, "loss": line.level, "low": line.is_low}
        for i, line in enumerate(lines)
        for j, (x, y) in enumerate(line.points)
    ]
    labels = [
        {"x": line.middle[0], "y": line.middle[1], "loss": line.level, "low": line.is_low}
        for line in labelled(lines, landscape)
    ]
    line = {"detail": {"field": "line"}, "order": {"field": "order"}}
    text = {"text": {"field": "loss", "format": ".3~g"}}
    return [
        {
            "data": {"values": [value for value in values if value["low"] == low]},
            "mark": {"type": mark, "style": f"{mark}-on-{'low' if low else 'high'}"},
            "encoding": encoding,
        }
        for mark, values, encoding in (("line", points, line), ("text", labels, text))
        for low in (True, False)
    ]


def _model_labels(across: Sequence[float]) -> list[Spec]:
    """Names, aligned towards the middle so that they stay in the picture; only their letters on a narrow screen."""
    middle = sum(across) / 2
    result = []
    for test, align, dx in (("datum.x < ", "left", 9), ("datum.x >= ", "right", -9)):
        for style in ("model-halo", "model-label"):
            mark = {"type": "text", "style": style, "align": align, "dx": dx, "dy": -9}
            result.append(
                {
                    "transform": [{"filter": f"{test}{middle!r}"}],
                    "mark": mark,
                    "encoding": {"text": {"condition": {"test": "width < 520", "field": "key"}, "field": "label"}},
                }
            )
    return result
