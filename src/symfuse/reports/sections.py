"""The sections of the page of runs, in reading order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from symfuse.reports import charts
from symfuse.reports.charts import OUTSIDE, layer_name
from symfuse.reports.collect import Collected, Document
from symfuse.reports.content import (
    SHARE,
    Alert,
    Cell,
    Chart,
    Part,
    Section,
    Table,
    axis_title,
    count,
    listed,
    short,
    tiny,
    unit_of,
    write,
)
from symfuse.reports.correspondence import Correspondence, Turn, correspondence
from symfuse.reports.origins import cost, evaluation, names, origins, pair, task
from symfuse.reports.paths import barrier_parts, barriers_text, inexact_curves, landscape_parts, landscape_text


def sections(collected: Collected) -> list[Section]:
    """All sections that are not empty."""
    made = [
        _done(collected),
        Section("What was matched, and how exactly", [part for run in collected.alignments for part in _matched(run)]),
        _distances(collected),
        Section(
            "Along the path: barriers", [part for run in collected.documents["barrier"] for part in barrier_parts(run)]
        ),
        Section("The landscape", [part for run in collected.documents["landscape"] for part in landscape_parts(run)]),
        Section("Correspondences", [part for one in _correspondences(collected) for part in _units(one)]),
        Section("The models' metrics", [evaluation(run) for run in collected.documents["evaluation"]]),
        cost(collected),
        origins(collected),
    ]
    return [section for section in made if section.parts]


def _done(collected: Collected) -> Section:
    """A sentence for each run, after alerts for alignments and paths that are not exact."""
    documents = collected.documents
    parts: list[Part] = [
        *(Alert(_proof(run)) for run in collected.alignments if not _is_equal(run)),
        *(alert for run in documents["barrier"] for alert in inexact_curves(run)),
        *map(_merge_text, documents["merge"]),
        *map(_alignment_text, collected.alignments),
        *map(barriers_text, documents["barrier"]),
        *map(landscape_text, documents["landscape"]),
        *(f"{count(len(r['models']), 'model')} evaluated: {task(r)}." for r in documents["evaluation"]),
    ]
    return Section("What was done", parts)


def _merge_text(run: Document) -> str:
    return f"{run['merged']}: a {run['method']} merge of {listed([short(one['name']) for one in run['inputs']])}."


def _alignment_text(run: Document) -> str:
    moved, units = (sum(row[key] for row in run["matched"]) for key in ("moved", "units"))
    distance, (source, anchor) = run.get("distance"), names(run)
    left = (
        ""
        if distance is None
        else (
            f", and {write(distance['left'], SHARE)} of the distance is left "
            f"({write(distance['before'])} → {write(distance['after'])})"
        )
    )
    proof = f" {_proof(run)}" if _is_equal(run) else ""
    return f"{source} was aligned to {anchor}: {moved:,} of {count(units, 'element')} moved{left}.{proof}"


def _verified(run: Document) -> Document:
    return run.get("verified") or {"errors": {}}


def _is_equal(run: Document) -> bool:
    """Whether no inequality is known."""
    if run.get("inexact"):
        return False
    verified = _verified(run)
    equal = verified.get("equal")
    return all(map(math.isfinite, verified["errors"].values())) if equal is None else bool(equal)


def _proof(run: Document) -> str:
    verified = _verified(run)
    errors = [math.inf if math.isnan(error) else error for error in verified["errors"].values()]
    source, anchor = names(run)
    if not _is_equal(run):
        variants = run.get("inexact")
        under = f" It was aligned under {listed(variants)}, which is inexact." if variants else ""
        allowed = verified.get("tolerance")
        result = f"they differ by {tiny(max(errors))}" if errors else "they differ, by an unknown amount"
        more = "" if allowed is None else f", where {tiny(allowed)} is allowed"
        compared = f"Its outputs were compared{_conditions(run)}, and {result}{more}."
        if variants and not errors:
            compared = "By how much its outputs differ was not checked."
        return (
            f"NOT EQUAL: {source}, aligned to {anchor}, no longer computes the same.{under} {compared} This alignment "
            "is not exact, and neither are its results."
        )
    if not errors:
        return "It was not checked that the function stayed the same."
    rounding = verified.get("rounding")
    rounded = "" if rounding is None else f", to {tiny(rounding)} after"
    return f"The outputs stay equal to {tiny(max(errors))} before the weights are rounded{rounded}{_conditions(run)}."


def _conditions(run: Document) -> str:
    inputs = _verified(run).get("inputs")
    return f" ({inputs})" if inputs else ""


def _matched(run: Document) -> list[Part]:
    rows: list[list[Cell]] = [
        [r["axis"], r["group"], r["moved"], r["units"], r["before"], r["after"], _left(r["after"], r["before"])]
        for r in run["matched"]
    ]
    columns = {
        "axis": "", "group": "", "moved": ",", "of": ",", "squared distance": ".4g", "after": ".4g", "left": SHARE,
    }  # fmt: skip
    biases = run.get("translated_biases")
    shifted = [f"{count(biases, 'bias vector')} translated."] if biases else []
    swept = [_descent(descents)] if (descents := run.get("descents")) else []
    swept += [_learning(learning["history"])] if (learning := run.get("learning")) else []
    if not _is_equal(run):
        return [Alert(_proof(run)), Table(pair(run), columns, rows), *shifted, *swept]
    return [Table(pair(run), columns, rows), " ".join([_proof(run), *shifted]), *swept]


def _descent(descents: Document) -> Chart:
    """The objective of matching axes that meet, sweep by sweep."""
    start, curve = min(descents.items(), key=lambda item: item[1][-1])
    text = f"The lowest squared distance, {write(curve[-1])}, is reached from {start} in {len(curve) - 1} sweeps."
    rows: list[list[Cell]] = [[name, i, value] for name, result in descents.items() for i, value in enumerate(result)]
    table = Table("", {"start": "", "sweep": ",", "squared distance": ".6g"}, rows)
    return Chart("The objective, sweep by sweep", text, charts.descent_chart(descents), table)


def _learning(history: Sequence[Document]) -> Chart:
    """The barrier while a matching was learned."""
    best = min(history, key=lambda one: one.get("decides", one["barrier"]))
    text = (
        f"The barrier on the validation data went from {write(history[0]['barrier'])} to {write(best['barrier'])}, at "
        f"step {best['step']}, whose parameters were kept."
    )
    rows: list[list[Cell]] = [[one["step"], one["loss"], one["barrier"]] for one in history]
    table = Table("", {"step": ",", "loss on the path": ".4g", "barrier": ".4g"}, rows)
    return Chart("The barrier, while it was learned away", text, charts.learning_chart(history), table)


def _left(after: float, before: float) -> float | None:
    return after / before if before else None


# -- distances -------------------------------------------------------------------------------------


def _distances(collected: Collected) -> Section:
    runs = [(pair(run), run["distance"]) for run in collected.alignments if run.get("distance")]
    runs += [(pair(run), run) for run in collected.documents["distance"]]
    return Section("Distances, before and after", [part for name, run in runs for part in _distance(name, run)])


def _distance(name: str, run: Document) -> list[Part]:
    outside = any(row["layer"] == -1 for row in run["by_layer"])
    parts: list[Part] = [
        f"{name}: Euclidean distance {write(run['before'])} → {write(run['after'])}, {write(run['left'], SHARE)} of "
        "it left. Parts are squared distances, which add up; “of whole” is a part's share of the total."
        + (f" Layer “{OUTSIDE}” has the tensors outside of layers, such as embeddings." if outside else "")
    ]
    texts = []
    for key in ("axis", "layer"):
        if rows := run[f"by_{key}"]:
            texts.append(_least(rows, key))
            parts.append(Chart(f"By {key}", texts[-1], charts.distance_bars(rows, key), _parts(rows, key), "half"))
    if both := [row for row in run["by_layer_and_axis"] if row["before"]]:
        text = " ".join(texts) or _least(both, "layer")
        table = _parts(run["by_layer_and_axis"], "layer", "axis")
        parts.append(Chart("Share left, by layer and axis", text, charts.share_map(both), table))
    return [*parts, _parts(run["by_tensor"], "tensor")] if run["by_tensor"] else parts


def _least(rows: Sequence[Document], key: str) -> str:
    part = min(rows, key=lambda row: row["share"])
    name = f"layer {layer_name(part[key])}" if key == "layer" else part[key]
    return f"The smallest share is left in {name}: {write(part['share'], SHARE)} of its squared distance."


def _parts(rows: Sequence[Document], *keys: str) -> Table:
    columns = dict.fromkeys(keys, "") | {
        "before": ".4g", "of whole": SHARE, "after": ".4g", "of whole, after": SHARE, "left": SHARE,
    }  # fmt: skip
    cells: list[list[Cell]] = []
    for row in rows:
        names = [layer_name(row[key]) if key == "layer" else row[key] for key in keys]
        start, end = row.get("of_whole") or (None, None)
        cells.append([*names, row["before"], start, row["after"], end, row["share"] if row["before"] else None])
    return Table(f"Squared distances by {listed(keys)}", columns, cells)


# -- correspondences -------------------------------------------------------------------------------


def _correspondences(collected: Collected) -> list[Correspondence]:
    return [correspondence(alignment, path.stem) for path, alignment in collected.elements.items()]


def _units(one: Correspondence) -> list[Part]:
    parts = [part for axis, turns in one.turns.items() for part in _turned(axis, turns)]
    for axis, result in one.reorderings.items():
        moved, size = sum(r.moved for r in result), sum(r.size for r in result)
        text = f"{axis}: {moved:,} of {count(size, unit_of(axis))} have another position."
        rows: list[list[Cell]] = [[r.place, r.moved, r.size, r.moved / r.size] for r in result]
        columns = {"place": "", "moved": ",", "of": ",", "share": SHARE}
        table = Table(f"{unit_of(axis).capitalize()}s moved ({axis})", columns, rows)
        parts.append(
            Chart(f"{axis_title(axis)}: which became which", text, charts.reordering_chart(result), table, "half")
            if moved
            else text
        )
    angle = " An angle is the mean over the eigenvalues of a rotation." if one.turns else ""
    if not all(turn.is_similarity for turns in one.turns.values() for turn in turns):
        angle += (
            " For a map that also stretches, the rotation is its polar factor, the scale the geometric mean of its "
            "singular values, and the condition number the ratio of the largest to the smallest."
        )
    named = f"{short(one.source)} → {short(one.anchor)}"
    inexact = [Alert(f"INEXACT: {named} was made under {listed(one.variants)}.")] if one.variants else []
    return [f"{named}.{angle}", *inexact, *parts] if parts else []


def _turned(axis: str, turns: Sequence[Turn]) -> Iterable[Part]:
    """A sentence, with a chart if there are several."""
    noun, degrees = turns[0].noun, [turn.degrees for turn in turns]
    low, mean, high = (write(d, ".2f") for d in (min(degrees), sum(degrees) / len(degrees), max(degrees)))
    if len(turns) == 1:
        scale = f" and scaled by {write(turns[0].scale)}" if turns[0].scale != 1 else ""
        return [f"{axis}: 1 {noun} turned by {mean} degrees{scale}{_stretched(turns)}."]
    text = f"{axis}: {count(len(turns), noun)} turned by {mean} degrees on average, {low} to {high}{_stretched(turns)}."
    rows: list[list[Cell]] = [[layer_name(t.layer), t.at, t.degrees, t.scale] for t in turns]
    title, columns = f"Rotation of each {noun}", {"layer": "", noun: "", "degrees": ".2f", "scale": ".4g"}
    if _stretched(turns):
        columns["condition number"] = ".4g"
        rows = [[*row, turn.condition] for row, turn in zip(rows, turns, strict=True)]
    table = Table(f"{title} ({axis})", columns, rows)
    return [Chart(f"{axis_title(axis)}: {title.lower()}", text, charts.turn_chart(turns), table, "half")]


def _stretched(turns: Sequence[Turn]) -> str:
    """The condition number in words; empty for rotations, with or without scales."""
    if all(turn.is_similarity for turn in turns):
        return ""
    worst = write(max(turn.condition for turn in turns))
    return f", and stretched: condition number {worst}{' at most' if len(turns) > 1 else ''}"
