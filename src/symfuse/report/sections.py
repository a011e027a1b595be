"""What the page says of runs, section by section, in the order in which it is read."""

from __future__ import annotations

from collections.abc import Sequence

from symfuse.report import charts
from symfuse.report.charts import OUTSIDE, layer_name
from symfuse.report.collect import Collected, Document
from symfuse.report.content import Cell, Chart, Part, Section, Table, axis_title, count, listed, short, tiny, write
from symfuse.report.correspondence import Correspondence, correspondence
from symfuse.report.landscape import KEYS, landscape_chart, losses
from symfuse.report.origins import cost, evaluation, names, origins, pair, task

_SHARE = ".1%"


def sections(found: Collected) -> list[Section]:
    """Those that there is something to say in."""
    made = [
        _done(found),
        Section("What was matched, and how exactly", [part for run in found.alignments for part in _matched(run)]),
        _distances(found),
        Section("Along the path: barriers", [part for run in found.documents["barrier"] for part in _barrier(run)]),
        Section("The landscape", [part for run in found.documents["landscape"] for part in _landscape(run)]),
        Section("Correspondences", [part for one in _correspondences(found) for part in _units(one)]),
        Section("The models' metrics", [evaluation(run) for run in found.documents["evaluation"]]),
        cost(found),
        origins(found),
    ]
    return [section for section in made if section.parts]


def _done(found: Collected) -> Section:
    """A sentence for each run."""
    documents = found.documents
    said = [
        *map(_merge_text, documents["merge"]),
        *map(_alignment_text, found.alignments),
        *map(_barriers_text, documents["barrier"]),
        *map(_landscape_text, documents["landscape"]),
        *(f"{count(len(r['models']), 'model')} evaluated: {task(r)}." for r in documents["evaluation"]),
    ]
    return Section("What was done", said)


def _merge_text(run: Document) -> str:
    return f"{run['merged']}: a {run['method']} merge of {listed([short(one['name']) for one in run['inputs']])}."


def _alignment_text(run: Document) -> str:
    moved, units = (sum(row[key] for row in run["matched"]) for key in ("moved", "units"))
    distance = run["distance"]
    source, anchor = names(run)
    return (
        f"{source} was aligned to {anchor}: {moved:,} of {count(units, 'element')} "
        f"moved, and {write(distance['left'], _SHARE)} of the distance is left "
        f"({write(distance['before'])} → {write(distance['after'])}). {_proof(run)}"
    )


def _barriers_text(run: Document) -> str:
    barriers = [f"{curve['name']} {curve['barrier']:.4f}" for curve in run["curves"]]
    source, anchor = names(run)
    return (
        f"The loss barrier on the path from {anchor} to {source} ({task(run)}), in nats, by alignment: "
        f"{listed(barriers)}."
    )


def _proof(run: Document) -> str:
    verified = run["verified"]
    errors = (verified or {}).get("errors") or {}
    if not errors:
        return "That the function stayed the same was not checked."
    rounded = f", to {tiny(verified['rounding'])} after" if "rounding" in verified else ""
    inputs = f" ({verified['inputs']})" if "inputs" in verified else ""
    return f"The outputs stay equal to {tiny(max(errors.values()))} before the weights are rounded{rounded}{inputs}."


def _matched(run: Document) -> list[Part]:
    rows = [
        [r["axis"], r["group"], r["moved"], r["units"], r["before"], r["after"], _left(r["after"], r["before"])]
        for r in run["matched"]
    ]
    columns = {
        "axis": "", "group": "", "moved": ",", "of": ",", "squared distance": ".4g", "after": ".4g", "left": _SHARE,
    }  # fmt: skip
    biases = run.get("translated biases", 0)
    said = [f"{count(biases, 'bias vector')} translated."] if biases else []
    return [Table(pair(run), columns, rows), " ".join([_proof(run), *said])]


def _left(after: float, before: float) -> float | None:
    return after / before if before else None


# -- distances -------------------------------------------------------------------------------------


def _distances(found: Collected) -> Section:
    runs = [(pair(run), run["distance"]) for run in found.alignments]
    runs += [(pair(run), run) for run in found.documents["distance"]]
    return Section("Distances, before and after", [part for name, run in runs for part in _distance(name, run)])


def _distance(name: str, run: Document) -> list[Part]:
    layers = run["by_layer"]
    nearest = min(layers, key=lambda row: row["share"]) if layers else None
    axis = min(run["by_axis"], key=lambda row: row["share"]) if run["by_axis"] else None
    outside = f" Layer “{OUTSIDE}” is what belongs to no layer, such as embeddings."
    parts: list[Part] = [
        f"{name}: Euclidean distance {write(run['before'])} → {write(run['after'])}, {write(run['left'], _SHARE)} of "
        f"it left. Parts are squared distances, which add up.{outside if any(r['layer'] == -1 for r in layers) else ''}"
    ]
    if axis is not None and nearest is not None:
        texts = {"axis": _most(axis["axis"], axis), "layer": _most(f"layer {layer_name(nearest['layer'])}", nearest)}
        for key, text in texts.items():
            rows = run[f"by_{key}"]
            parts.append(Chart(f"By {key}", text, charts.distance_bars(rows, key), _parts(rows, key), "half"))
        both = run["by_layer_and_axis"]
        text, table = " ".join(texts.values()), _parts(both, "layer", "axis")
        parts.append(Chart("Share left, by layer and axis", text, charts.share_map(both), table))
    return [*parts, _parts(run["by_tensor"], "tensor")]


def _most(name: str, part: Document) -> str:
    return f"The distance shrank most in {name}: {write(part['share'], _SHARE)} of the square is left."


def _parts(rows: Sequence[Document], *keys: str) -> Table:
    columns = dict.fromkeys(keys, "") | {"before": ".4g", "after": ".4g", "left": _SHARE}
    cells: list[list[Cell]] = []
    for row in rows:
        names = [layer_name(row[key]) if key == "layer" else row[key] for key in keys]
        cells.append([*names, row["before"], row["after"], row["share"] if row["before"] else None])
    return Table(f"Squared distances by {listed(keys)}", columns, cells)


# -- barriers and landscapes -----------------------------------------------------------------------


def _barrier_text(run: Document) -> str:
    said = []
    for curve in run["curves"]:
        at = f" at λ = {curve['at']:.4g}" if curve["barrier"] else ""
        left = [f"{write(v, _SHARE)} of {base}" for base, v in curve.get("left of", {}).items() if v is not None]
        said.append(f"{curve['name']} {curve['barrier']:.4f} nats{at}" + (f" ({listed(left)})" if left else ""))
    return f"The loss barrier between {' and '.join(names(run))} ({task(run)}): {'; '.join(said)}."


def _barrier(run: Document) -> list[Part]:
    source, anchor = names(run)
    metrics = list(run["curves"][0]["points"][0]["metrics"])
    bases = list(dict.fromkeys(base for curve in run["curves"] for base in curve.get("left of", {})))
    table = Table(
        pair(run),
        {"alignment": "", "distance": ".4g", "loss at λ = 0": ".4f", "at λ = 1": ".4f", "barrier": ".4f",
         "over the mean": ".4f", "λ of the maximum": ".4g", **{f"share of {base}": _SHARE for base in bases}},
        [
            [c["name"], c["distance"], c["points"][0]["loss"], c["points"][-1]["loss"], c["barrier"],
             c["barrier over mean"], c["at"] if c["barrier"] else None, *(c.get("left of", {}).get(b) for b in bases)]
            for c in run["curves"]
        ],
        {"barrier": "min", "over the mean": "min"},
    )  # fmt: skip
    points = Table(
        "Losses and metrics along the paths",
        {"alignment": "", "λ": ".4g", "loss": ".4f"} | dict.fromkeys(metrics, ".4f"),
        [
            [c["name"], p["at"], p["loss"], *(p["metrics"].get(m) for m in metrics)]
            for c in run["curves"]
            for p in c["points"]
        ],
    )
    parts: list[Part] = [
        f"The models on the straight path are λ·A + (1 − λ)·B: λ = 0 is B, {anchor}; λ = 1 is A, "
        f"{source}. The barrier is the most that the loss rises above the chord between the endpoints (dashed); "
        "“over the mean” takes their mean instead.",
        Chart("The loss along the path", _barrier_text(run), charts.curve_chart(run), points),
        table,
    ]
    size = "half" if len(metrics) > 1 else "wide"
    return parts + [
        Chart(f"{m} along the path", _metric_text(run, m), charts.curve_chart(run, m), points, size) for m in metrics
    ]


def _metric_text(run: Document, metric: str) -> str:
    ranges = []
    for curve in run["curves"]:
        values = [p["metrics"][metric] for p in curve["points"] if metric in p["metrics"]]
        ranges.append(f"{curve['name']} {write(min(values))} to {write(max(values))}")
    return f"{metric} along the paths: {'; '.join(ranges)}."


def _landscape_text(run: Document) -> str:
    found = losses(run)
    models = [f"{k}: {short(m['name'])} ({m['loss']:.4f})" for k, m in zip(KEYS, run["models"], strict=False)]
    return (
        f"The loss on the plane through {listed(models)} ({task(run)}) lies between {write(min(found), '.4f')} "
        f"and {write(max(found), '.4f')}."
    )


def _landscape(run: Document) -> list[Part]:
    metrics = list(run.get("metrics", {}))
    models = Table(
        "The models in the plane",
        {"model": "", "x": ".4g", "y": ".4g", "loss": ".4f"} | dict.fromkeys(run["models"][0]["metrics"], ".4f"),
        [
            [f"{k}: {short(m['name'])}", m["x"], m["y"], m["loss"], *m["metrics"].values()]
            for k, m in zip(KEYS, run["models"], strict=False)
        ],
    )
    grid = Table(
        "Losses on the grid",
        {"x": ".4g", "y": ".4g", "loss": ".4f"} | dict.fromkeys(metrics, ".4f"),
        [
            [x, y, run["loss"][i][j], *(run["metrics"][m][i][j] for m in metrics)]
            for i, y in enumerate(run["ys"])
            for j, x in enumerate(run["xs"])
        ],
    )
    text = "Axes are Euclidean distances in weight space, from the first model. Lines join points of equal loss."
    return [text, Chart("Loss on the plane", _landscape_text(run), landscape_chart(run), grid), models]


# -- correspondences -------------------------------------------------------------------------------


def _correspondences(found: Collected) -> list[Correspondence]:
    return [correspondence(alignment, path.stem) for path, alignment in found.elements.items()]


def _units(one: Correspondence) -> list[Part]:
    parts: list[Part] = []
    for axis, turns in one.turns.items():
        degrees = [turn.degrees for turn in turns]
        text = (
            f"{axis}: {count(len(turns), 'head')} turned by {write(sum(degrees) / len(degrees), '.2f')} degrees on "
            f"average, {write(min(degrees), '.2f')} to {write(max(degrees), '.2f')}."
        )
        rows: list[list[Cell]] = [[layer_name(t.layer), t.head, t.degrees, t.scale] for t in turns]
        table = Table(
            f"Rotation of each head ({axis})", {"layer": "", "head": "", "degrees": ".2f", "scale": ".4g"}, rows
        )
        parts.append(Chart(f"{axis_title(axis)}: rotation of each head", text, charts.turn_chart(turns), table, "half"))
    for axis, found in one.reorderings.items():
        moved, size = sum(r.moved for r in found), sum(r.size for r in found)
        text = f"{axis}: {moved:,} of {count(size, 'unit')} have another place."
        rows = [[r.place, r.moved, r.size, r.moved / r.size] for r in found]
        table = Table(f"Units moved ({axis})", {"place": "", "moved": ",", "of": ",", "share": _SHARE}, rows)
        parts.append(
            Chart(f"{axis_title(axis)}: which became which", text, charts.reordering_chart(found), table, "half")
            if moved
            else text
        )
    angle = " The angle of a head is the mean over the eigenvalues of its rotation." if one.turns else ""
    return [f"{short(one.source)} → {short(one.anchor)}.{angle}", *parts] if parts else []
