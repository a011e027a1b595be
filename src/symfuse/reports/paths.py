"""The page's text, tables and charts of losses: on paths between models, and on planes through them."""

from __future__ import annotations

from symfuse.reports import charts
from symfuse.reports.collect import Document
from symfuse.reports.content import SHARE, Alert, Cell, Chart, Part, Table, listed, metric_titles, short, write
from symfuse.reports.landscape import KEYS, landscape_chart, losses
from symfuse.reports.origins import names, pair, task


def barriers_text(run: Document) -> str:
    barriers = [f"{curve['name']} {curve['barrier']:.4f}" for curve in run["curves"]]
    source, anchor = names(run)
    return (
        f"The loss barrier on the path from {anchor} to {source} ({task(run)}), in nats, by alignment: "
        f"{listed(barriers)}."
    )


def inexact_curves(run: Document) -> list[Alert]:
    """An alert for each curve whose end at λ = 1 computes another function than A."""
    source, _ = names(run)
    return [
        Alert(
            f"INEXACT: on the path {curve['name']} the end at λ = 1 is not {source}: it was aligned under "
            f"{listed(curve['inexact'])}, and computes another function."
        )
        for curve in run["curves"]
        if curve.get("inexact")
    ]


def _place(curve: Document, height: str, at: str) -> float | None:
    """The λ of a maximum; None if its height is within the rounding of the losses (0 for older runs)."""
    place: float | None = curve.get(at)
    return place if curve[height] > (curve.get("rounding") or 0.0) else None


def _barrier_text(run: Document) -> str:
    texts = []
    for curve in run["curves"]:
        place = _place(curve, "barrier", "at")
        at = "" if place is None else f" at λ = {place:.4g}"
        left = [f"{write(v, SHARE)} of {base}" for base, v in curve["left_of"].items() if v is not None]
        texts.append(f"{curve['name']} {curve['barrier']:.4f} nats{at}" + (f" ({listed(left)})" if left else ""))
    return f"The loss barrier between {' and '.join(names(run))} ({task(run)}): {'; '.join(texts)}."


def barrier_parts(run: Document) -> list[Part]:
    source, anchor = names(run)
    metrics = charts.curve_metrics(run)
    points = Table(
        "Losses and metrics along the paths",
        {"alignment": "", "λ": ".4g", "loss": ".4f"} | dict.fromkeys(metrics.values(), ".4f"),
        [
            [c["name"], p["at"], p["loss"], *(p["metrics"].get(m) for m in metrics)]
            for c in run["curves"]
            for p in c["points"]
        ],
    )
    parts: list[Part] = [
        *inexact_curves(run),
        f"The models on the straight path are λ·A + (1 − λ)·B: λ = 0 is B, {anchor}; λ = 1 is A, "
        f"{source}. The barrier is the largest rise of the loss above the chord between the endpoints (dashed); "
        "“over the mean” is the largest rise above their mean.",
        Chart("The loss along the path", _barrier_text(run), charts.curve_chart(run), points),
        _barriers(run),
    ]
    size = "half" if len(metrics) > 1 else "wide"
    return parts + [
        Chart(f"{title} along the path", _metric_text(run, m, title), charts.curve_chart(run, m), points, size)
        for m, title in metrics.items()
    ]


def _barriers(run: Document) -> Table:
    curves = run["curves"]
    bases = list(dict.fromkeys(base for curve in curves for base in curve["left_of"]))
    columns = {
        "alignment": "", "distance": ".4g", "loss at λ = 0": ".4f", "at λ = 1": ".4f", "barrier": ".4f",
        "λ of the maximum": ".4g", "over the mean": ".4f", "λ of this maximum": ".4g",
    } | {f"share of {base}": SHARE for base in bases}  # fmt: skip
    rows: list[list[Cell]] = [
        [
            c["name"], c["distance"], c["points"][0]["loss"], c["points"][-1]["loss"], c["barrier"],
            _place(c, "barrier", "at"), c["barrier_over_mean"], _place(c, "barrier_over_mean", "at_over_mean"),
            *(c["left_of"].get(base) for base in bases),
        ]
        for c in curves
    ]  # fmt: skip
    zero = [c.get("rounding") or 0.0 for c in curves]
    return Table(pair(run), columns, rows, {"barrier": "min", "over the mean": "min"}, zero)


def _metric_text(run: Document, metric: str, title: str) -> str:
    ranges = [
        f"{curve['name']} {write(min(values))} to {write(max(values))}"
        for curve in run["curves"]
        if (values := [point["metrics"][metric] for point in curve["points"] if metric in point["metrics"]])
    ]
    return f"{title} along the paths: {'; '.join(ranges)}."


def landscape_text(run: Document) -> str:
    result = losses(run)
    models = [f"{k}: {short(m['name'])} ({m['loss']:.4f})" for k, m in zip(KEYS, run["models"], strict=False)]
    range_ = f"is between {min(result):.4f} and {max(result):.4f}" if result else "is nowhere finite"
    return f"The loss on the plane through {listed(models)} ({task(run)}) {range_}."


def landscape_parts(run: Document) -> list[Part]:
    own = {"model": "", "x": ".4g", "y": ".4g", "loss": ".4f"}
    metrics = metric_titles((model["metrics"] for model in run["models"]), taken=own)
    models = Table(
        "The models in the plane",
        own | dict.fromkeys(metrics.values(), ".4f"),
        [
            [f"{k}: {short(m['name'])}", m["x"], m["y"], m["loss"], *(m["metrics"].get(metric) for metric in metrics)]
            for k, m in zip(KEYS, run["models"], strict=False)
        ],
    )
    grids = run.get("metrics") or {}
    own = {"x": ".4g", "y": ".4g", "loss": ".4f"}
    grid = Table(
        "Losses on the grid",
        own | dict.fromkeys(metric_titles([grids], taken=own).values(), ".4f"),
        [
            [x, y, run["loss"][i][j], *(values[i][j] for values in grids.values())]
            for i, y in enumerate(run["ys"])
            for j, x in enumerate(run["xs"])
        ],
    )
    text = "Axes are Euclidean distances in weight space, from the first model. Lines join points of equal loss."
    return [text, Chart("Loss on the plane", landscape_text(run), landscape_chart(run), grid), models]
