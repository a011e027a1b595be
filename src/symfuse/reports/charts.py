"""Charts as Vega-Lite specifications: plain dicts, drawn by the page.

Colours are in the page's style sheet, which has two sets of them: marks have a named `style`, and scales use the page's
ranges (`category`, `ramp`, `heatmap`). Names and numbers are only in the data, never in an expression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from symfuse.reports.content import metric_titles, unit_of
from symfuse.reports.correspondence import Reordering, Turn, bins

Spec = dict[str, Any]
Run = Mapping[str, Any]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
OUTSIDE = "none"  # the name for tensors outside of all layers
_LEGEND = {"orient": "top", "title": None, "columns": {"expr": "width < 420 ? 2 : 5"}, "labelLimit": 180}


def layer_name(layer: int) -> str:
    return OUTSIDE if layer == -1 else str(layer)


def spec_of(values: Sequence[Mapping[str, Any]], **rest: Any) -> Spec:
    data = {"values": [{key: number(value) for key, value in row.items()} for row in values]}
    size = {"width": "container", "height": 220, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {"$schema": _SCHEMA, **size, "data": data, **rest}


def number(value: Any) -> Any:
    """None for NaN and infinity, which JSON in a browser does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ramp(title: str, **scale: Any) -> Spec:
    legend = {"title": title, "orient": "top", "gradientLength": 180, "gradientThickness": 10, "titleLimit": 240}
    return {"type": "quantitative", "legend": legend, "scale": {"range": "heatmap", **scale}}


# -- distances -------------------------------------------------------------------------------------


def distance_bars(rows: Sequence[Run], key: str) -> Spec:
    """Squared distances before and after, by "axis" (one below the other) or "layer" (side by side)."""
    values = []
    for row in rows:
        name = layer_name(row[key]) if key == "layer" else row[key]
        whole = row.get("of_whole") or (None, None)
        values += [
            {"part": name, "when": when, "value": row[when], "of whole": of, "share": row["share"]}
            for when, of in zip(("before", "after"), whole, strict=True)
        ]
    along = {"field": "part", "type": "ordinal", "sort": None, "title": key, "axis": {"labelAngle": 0}}
    up = {"field": "value", "type": "quantitative", "title": "squared distance"}
    beside = {"field": "when", "sort": ["before", "after"]}
    scale = {"domain": ["before", "after"], "range": "ordinal"}
    sides = ("y", "x") if key == "axis" else ("x", "y")
    return spec_of(
        values,
        height=30 * len(rows) if key == "axis" else 200,
        params=[{"name": "shown", "select": {"type": "point", "fields": ["when"]}, "bind": "legend"}],
        mark={"type": "bar", "cornerRadiusEnd": 2},
        encoding={
            sides[0]: along,
            sides[1]: up,
            f"{sides[0]}Offset": beside,
            "color": {"field": "when", "type": "nominal", "scale": scale, "legend": _LEGEND},
            "opacity": {"condition": {"param": "shown", "value": 1}, "value": 0.12},
            "tooltip": [
                {"field": "part", "title": key},
                {"field": "when", "title": "alignment"},
                {"field": "value", "title": "squared distance", "format": ".4g"},
                {"field": "of whole", "format": ".1%"},
                {"field": "share", "title": "left", "format": ".1%"},
            ],
        },
    )


def descent_chart(descents: Mapping[str, Sequence[float]]) -> Spec:
    """The squared distance after each sweep, from each start."""
    values = [
        {"start": start, "sweep": sweep, "distance": distance}
        for start, curve in descents.items()
        for sweep, distance in enumerate(curve)
    ]
    colour = {"field": "start", "type": "nominal", "sort": None, "scale": {"domain": list(descents)}, "legend": _LEGEND}
    return _line(
        values,
        {"field": "sweep", "type": "quantitative", "axis": {"tickMinStep": 1, "format": "d"}},
        {"field": "distance", "type": "quantitative", "title": "squared distance", "scale": {"zero": False}},
        [{"field": "start"}, {"field": "sweep"}, {"field": "distance", "format": ".5g"}],
        color=colour,
    )


def learning_chart(history: Sequence[Run]) -> Spec:
    """The barrier on the validation data by the steps of learning."""
    return _line(
        [{"step": one["step"], "barrier": one["barrier"]} for one in history],
        {"field": "step", "type": "quantitative", "axis": {"format": "d"}},
        {"field": "barrier", "type": "quantitative"},
        [{"field": "step"}, {"field": "barrier", "format": ".4g"}],
    )


def _line(values: Sequence[Run], x: Spec, y: Spec, tooltip: Sequence[Spec], **encoding: Spec) -> Spec:
    return spec_of(
        values, mark={"type": "line", "point": True}, encoding={"x": x, "y": y, "tooltip": tooltip, **encoding}
    )


def share_map(rows: Sequence[Run]) -> Spec:
    """The share of the squared distance that is left, by layer and axis."""
    keys = ("axis", "before", "after", "share")
    values = [{"layer": layer_name(row["layer"]), **{key: row[key] for key in keys}} for row in rows]
    return _tiles(
        values,
        26 * len({value["axis"] for value in values}),
        across={"field": "layer", "title": "layer"},
        down={"field": "axis", "title": None},
        color={"field": "share", **ramp("share left", domain=[0, 1], clamp=True)},
        tooltip=[
            {"field": "layer"},
            {"field": "axis"},
            {"field": "before", "title": "squared distance before", "format": ".4g"},
            {"field": "after", "format": ".4g"},
            {"field": "share", "title": "left", "format": ".1%"},
        ],
    )


def _tiles(values: Sequence[Run], height: int, across: Spec, down: Spec, **encoding: Any) -> Spec:
    axis = {"labelAngle": 0, "domain": False, "ticks": False}
    ordinal = {"type": "ordinal", "sort": None, "axis": axis}
    return spec_of(
        values,
        height=height,
        mark={"type": "rect", "style": "tile"},
        encoding={"x": ordinal | across, "y": ordinal | down, **encoding},
    )


# -- barriers --------------------------------------------------------------------------------------


def curve_metrics(barrier: Run) -> dict[str, str]:
    """All metrics of its points, with titles that differ from the other columns of a point."""
    scores = (point["metrics"] for curve in barrier["curves"] for point in curve["points"])
    return metric_titles(scores, taken=("alignment", "λ", "loss", "loss (nats)"))


def curve_chart(barrier: Run, metric: str | None = None) -> Spec:
    """The loss, or a metric, along the paths of all curves; for the loss also their chords."""
    metrics = curve_metrics(barrier)
    values = [
        {
            "alignment": curve["name"],
            "at": point["at"],
            "value": point["loss"] if metric is None else point["metrics"].get(metric),
            "loss": point["loss"],
            "end": point["at"] in (0, 1),
            **{f"m{i}": point["metrics"].get(name) for i, name in enumerate(metrics)},
        }
        for curve in barrier["curves"]
        for point in curve["points"]
    ]
    names = [curve["name"] for curve in barrier["curves"]]
    colour = {"field": "alignment", "type": "nominal", "sort": None, "scale": {"domain": names}, "legend": _LEGEND}
    tooltip = [
        {"field": "alignment"},
        {"field": "at", "title": "λ", "format": ".4~f"},
        {"field": "loss", "title": "loss (nats)", "format": ".4f"},
        *({"field": f"m{i}", "title": title, "format": ".4f"} for i, title in enumerate(metrics.values())),
    ]
    shown = {"condition": {"param": "shown", "value": 1}, "value": 0.06}
    faint = {"condition": {"param": "shown", "value": 0.55}, "value": 0.03}
    layers: list[Spec] = []
    if metric is None:
        chord = {"type": "line", "strokeDash": [3, 4], "strokeWidth": 1}
        layers.append(
            {"transform": [{"filter": "datum.end"}], "mark": chord, "encoding": {"opacity": faint, "color": colour}}
        )
    layers += [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"opacity": shown, "color": colour}},
        {
            "params": [{"name": "shown", "select": {"type": "point", "fields": ["alignment"]}, "bind": "legend"}],
            "mark": {"type": "point", "filled": True, "size": 46},
            "encoding": {
                "opacity": shown,
                "color": colour,
                "shape": {**colour, "type": "nominal"},
                "size": {"condition": {"test": "datum.end", "value": 90}, "value": 46},
                "tooltip": tooltip,
            },
        },
    ]
    return spec_of(
        values,
        height=300 if metric is None else 220,
        encoding={
            "x": {"field": "at", "type": "quantitative", "title": "λ", "scale": {"domain": [0, 1]}},
            "y": {
                "field": "value",
                "type": "quantitative",
                "title": "loss (nats)" if metric is None else metrics[metric],
                "scale": {"zero": False},
            },
        },
        layer=layers,
    )


# -- correspondences -------------------------------------------------------------------------------


def reordering_chart(reorderings: Sequence[Reordering]) -> Spec:
    """The units of the source (across) against those of the anchor (down); a menu selects one instance."""
    side = bins(tuple(reorderings))
    size, noun = reorderings[0].size, unit_of(reorderings[0].axis)
    values = []
    for number, one in enumerate(reorderings):
        density = one.density(side)
        values += [{"p": number, "x": x, "y": y, "n": density[y, x].item()} for y, x in density.nonzero().tolist()]
    names = [one.place for one in reorderings]
    choice = {"input": "select", "options": list(range(len(names))), "labels": names, "name": "shown: "}
    scale = {"domain": [0, size], "nice": False}
    unit = {"type": "quantitative", "axis": {"grid": False, "tickMinStep": 1}}
    edges = [
        {"calculate": f"ceil((datum.{field} + {plus}) * {size} / {side})", "as": f"{field}{1 + plus}"}
        for field in "xy"
        for plus in (0, 1)
    ]
    spec = spec_of(
        values,
        usermeta={"aspect": 1},
        params=[{"name": "place", "value": 0, "bind": choice}] if len(names) > 1 else [],
        transform=[*([{"filter": "datum.p == place"}] if len(names) > 1 else []), *edges],
        mark={"type": "rect", "style": "unit"},
        encoding={
            "x": {"field": "x1", "title": f"{noun} of the source", "scale": scale, **unit},
            "x2": {"field": "x2"},
            "y": {"field": "y1", "title": f"{noun} of the anchor", "scale": {**scale, "reverse": True}, **unit},
            "y2": {"field": "y2"},
            "tooltip": [
                {"field": "x1", "title": "source, from"},
                {"field": "y1", "title": "anchor, from"},
                {"field": "n", "title": f"{noun}s"},
            ],
        },
    )
    if side < size:
        spec["encoding"]["color"] = {"field": "n", **ramp(f"{noun}s", domainMin=0)}
    return spec


def turn_chart(turns: Sequence[Turn]) -> Spec:
    """The mean rotation angle of each rotated space, such as a head, by layer and number."""
    values = [
        {"layer": layer_name(t.layer), "at": t.at or "0", "degrees": t.degrees, "scale": t.scale, "cond": t.condition}
        for t in turns
    ]
    condition = {"field": "cond", "title": "condition number", "format": ".4g"}
    return _tiles(
        values,
        20 * len({turn.layer for turn in turns}),
        across={"field": "at", "title": turns[0].noun},
        down={"field": "layer", "title": "layer"},
        color={"field": "degrees", **ramp("mean angle (degrees)", domainMin=0, nice=False)},
        tooltip=[
            {"field": "layer"},
            {"field": "at", "title": turns[0].noun},
            {"field": "degrees", "title": "mean angle (degrees)", "format": ".2f"},
            {"field": "scale", "format": ".4g"},
            *([] if all(turn.is_similarity for turn in turns) else [condition]),
        ],
    )
