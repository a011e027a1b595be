"""The page's tables, pictures and sentences against the documents: each number in its place, none of them mirrored,
transposed or in another's column."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.tiny import MODELS
from reports.reading import Read, Reader, broken
from symfuse import api
from symfuse.alignment import random_alignment
from symfuse.errors import CheckpointError
from symfuse.evaluation.distance import Distance, Gap, Piece
from symfuse.matching.problem import ROTATABLE
from symfuse.model import Model
from symfuse.reports import distances
from symfuse.reports.charts import curve_chart, distance_bars, reordering_chart, share_map, turn_chart
from symfuse.reports.correspondence import Reordering, Turn, correspondence
from symfuse.reports.landscape import landscape_chart
from symfuse.reports.page import page
from symfuse.rewriting import canonical

Documents = dict[str, dict[str, Any]]


def shown(folder: Path, *documents: dict[str, Any]) -> Reader:
    """The page of these documents, read back."""
    files = []
    for i, document in enumerate(documents):
        files.append(folder / f"{i}.json")
        files[-1].write_text(json.dumps(document), "utf-8")
    return Reader(page(files))


@pytest.fixture
def barrier(documents: Documents) -> dict[str, Any]:
    return documents["barrier"]


@pytest.fixture
def plane(documents: Documents) -> dict[str, Any]:
    """More wide than high."""
    run = copy.deepcopy(documents["landscape"])
    run["ys"], run["loss"] = run["ys"][:5], run["loss"][:5]
    run["metrics"] = {name: grid[:5] for name, grid in run["metrics"].items()}
    return run


# -- distances -------------------------------------------------------------------------------------


def test_what_was_matched(tmp_path: Path, documents: Documents) -> None:
    run = broken(documents["alignment"], "matched", 0, "moved", value=3)
    table = next(table for table in shown(tmp_path, run).tables if "moved" in table.head)
    assert table.column("axis") == [row["axis"] for row in run["matched"]]
    assert table.column("squared distance") == [row["before"] for row in run["matched"]]
    assert table.column("after") == [row["after"] for row in run["matched"]]
    assert table.column("left") == [row["after"] / row["before"] for row in run["matched"]]
    assert table.column("moved") == [f"{row['moved']:,}" for row in run["matched"]]
    assert table.column("of") == [f"{row['units']:,}" for row in run["matched"]]


def test_sentences_about_distances(tmp_path: Path, documents: Documents) -> None:
    run = documents["alignment"]
    distance, found = run["distance"], shown(tmp_path, run)
    arrow = f"{distance['before']:.4g} → {distance['after']:.4g}"
    assert [arrow in text for text in found.texts].count(True) == 2  # in what was done, and among the distances
    for key, name in (("axis", "{axis}"), ("layer", "layer {layer}")):
        least = min(distance[f"by_{key}"], key=lambda row: row["share"])
        assert (
            f"The smallest share is left in {name.format(**least)}: {least['share']:.1%} of its squared distance."
            in found.texts
        )


@pytest.mark.parametrize("key", ["axis", "layer", "tensor"])
def test_distances_and_their_parts_of_the_whole(key: str, tmp_path: Path, documents: Documents) -> None:
    run = documents["distance"]
    rows = run[f"by_{key}"]
    table = shown(tmp_path, run).table(f"Squared distances by {key}")
    names = ["none" if row[key] == -1 else str(row[key]) for row in rows]
    assert table.head == [key, "before", "of whole", "after", "of whole, after", "left"]
    assert table.column(key) == names
    for title, when in (("before", "before"), ("after", "after"), ("left", "share")):
        assert table.column(title) == [row[when] for row in rows]
    for title, when in (("of whole", "before"), ("of whole, after", "after")):
        expected = [row[when] / run[when] ** 2 for row in rows]
        assert table.column(title) == pytest.approx(expected)
        assert sum(map(float, table.column(title))) == pytest.approx(1)
    assert any(row["before"] > 1.01 * row["after"] for row in rows)


def test_runs_without_parts_of_the_whole(tmp_path: Path, documents: Documents) -> None:
    run = copy.deepcopy(documents["distance"])
    for row in run["by_axis"]:
        del row["of_whole"]
    table = shown(tmp_path, run).table("Squared distances by axis")
    assert set(table.column("of whole")) == set(table.column("of whole, after")) == {"–"}
    assert table.column("before") == [row["before"] for row in run["by_axis"]]


def test_parts_of_the_whole() -> None:
    def found(*squares: float) -> Distance:
        return Distance(
            tuple(Piece("w", axis, 0, Gap(s, 0.0, 1.0, 1.0)) for axis, s in zip("ab", squares, strict=True))
        )

    rows = distances(found(3.0, 1.0), found(1.0, 1.0))["by_axis"]
    assert [row["of_whole"] for row in rows] == [[0.75, 0.5], [0.25, 0.5]]
    assert [(row["before"], row["after"], row["share"]) for row in rows] == [(3.0, 1.0, 1 / 3), (1.0, 1.0, 1.0)]
    assert distances(found(3.0, 1.0), found(0.0, 0.0))["by_axis"][0]["of_whole"] == [0.75, None]


def test_pictures_of_distances(documents: Documents) -> None:
    run = documents["distance"]
    for key in ("axis", "layer"):
        rows = run[f"by_{key}"]
        spec = distance_bars(rows, key)
        assert spec["encoding"]["color"]["scale"]["domain"] == ["before", "after"]
        values = spec["data"]["values"]
        for i, when in enumerate(("before", "after")):
            one = [value for value in values if value["when"] == when]
            assert [value["value"] for value in one] == [row[when] for row in rows]
            assert [value["of whole"] for value in one] == [row["of_whole"][i] for row in rows]
    both = run["by_layer_and_axis"]
    tiles = share_map(both)["data"]["values"]
    for row, tile in zip(both, tiles, strict=True):
        assert tile == {
            "layer": "none" if row["layer"] == -1 else str(row["layer"]),
            **{key: row[key] for key in ("axis", "before", "after", "share")},
        }


@pytest.mark.parametrize("empty", ["by_axis", "by_layer", "by_layer_and_axis", "by_tensor", "all"])
def test_distances_without_rows(empty: str, tmp_path: Path, documents: Documents) -> None:
    keys = [key for key in documents["distance"] if key == empty or (empty == "all" and key.startswith("by_"))]
    found = shown(tmp_path, documents["distance"] | {key: [] for key in keys})
    assert "Euclidean distance" in found.texts[0]
    assert all(table.rows for table in found.tables)
    assert all(spec["data"]["values"] for spec in found.specs)


# -- barriers --------------------------------------------------------------------------------------


def barriers(found: Reader) -> Read:
    return next(table for table in found.tables if "barrier" in table.head)


def test_the_table_of_barriers(tmp_path: Path, barrier: dict[str, Any]) -> None:
    curves = barrier["curves"]
    losses = [[point["loss"] for point in curve["points"]] for curve in curves]
    assert all(line[0] < line[-1] for line in losses)  # else the ends could be swapped
    table = barriers(shown(tmp_path, barrier))
    assert table.column("alignment") == [curve["name"] for curve in curves]
    assert table.column("loss at λ = 0") == [line[0] for line in losses]
    assert table.column("at λ = 1") == [line[-1] for line in losses]
    for title, key in (
        ("distance", "distance"), ("barrier", "barrier"), ("over the mean", "barrier_over_mean"),
        ("λ of the maximum", "at"),
    ):  # fmt: skip
        assert table.column(title) == [curve[key] for curve in curves]
    assert table.column("share of none")[1] == curves[1]["left_of"]["none"]
    lowest = [min(range(2), key=lambda i: curves[i][key]) for key in ("barrier", "barrier_over_mean")]
    assert table.best == set(zip(lowest, ("barrier", "over the mean"), strict=True))


def test_where_the_loss_is_highest_over_the_mean(tmp_path: Path, barrier: dict[str, Any]) -> None:
    run = broken(barrier, "curves", 0, "at_over_mean", value=0.375)
    run["curves"][1].pop("at_over_mean", None)  # as in older runs
    table = barriers(shown(tmp_path, run))
    assert table.column("λ of this maximum") == [0.375, "–"]
    head = table.head
    assert head.index("λ of this maximum") == head.index("over the mean") + 1 == head.index("λ of the maximum") + 2


def test_a_maximum_that_is_only_rounding_has_no_place_and_is_not_the_best(
    tmp_path: Path, barrier: dict[str, Any]
) -> None:
    run = copy.deepcopy(barrier)
    third = copy.deepcopy(run["curves"][1]) | {"name": "third"}
    run["curves"].append(third)
    for curve, height in zip(run["curves"], (3e-8, 2e-8, 0.5), strict=True):
        heights = {"barrier": height, "barrier_over_mean": height, "at": 0.8, "at_over_mean": 0.7}
        curve |= heights | {"rounding": 1e-7}
    found = shown(tmp_path, run)
    table = barriers(found)
    assert table.column("λ of the maximum") == ["–", "–", 0.8]
    assert table.column("λ of this maximum") == ["–", "–", 0.7]
    assert table.best == {(row, title) for row in (0, 1) for title in ("barrier", "over the mean")}
    said = " ".join(found.texts)
    assert said.count("at λ = 0.8") == 1
    assert "third 0.5000 nats at λ = 0.8" in said
    for curve in run["curves"]:  # as in older runs
        del curve["rounding"]
    table = barriers(shown(tmp_path, run))
    assert table.column("λ of the maximum") == [0.8] * 3
    assert table.best == {(1, "barrier"), (1, "over the mean")}


def test_curves(tmp_path: Path, barrier: dict[str, Any]) -> None:
    expected = [(c["name"], p["at"], p["loss"]) for c in barrier["curves"] for p in c["points"]]
    values = curve_chart(barrier)["data"]["values"]
    assert [(v["alignment"], v["at"], v["value"]) for v in values] == expected
    assert [v["end"] for v in values] == [at in (0, 1) for _, at, _ in expected]
    mirrored = {(name, 1 - at, loss) for name, at, loss in expected}
    assert len(mirrored & set(expected)) <= 2  # not symmetric, but perhaps in the middles
    accuracy = [p["metrics"]["accuracy"] for c in barrier["curves"] for p in c["points"]]
    values = curve_chart(barrier, "accuracy")["data"]["values"]
    assert [v["value"] for v in values] == accuracy
    table = shown(tmp_path, barrier).table("Losses and metrics along the paths")
    columns = [table.column(title) for title in ("alignment", "λ", "loss", "accuracy")]
    assert list(zip(*columns, strict=True)) == [(*one, a) for one, a in zip(expected, accuracy, strict=True)]


def test_curves_with_different_metrics(tmp_path: Path, barrier: dict[str, Any]) -> None:
    points = [{**point, "metrics": {"f1": 0.25 + point["at"]}} for point in barrier["curves"][1]["points"]]
    found = shown(tmp_path, broken(barrier, "curves", 1, "points", value=points))
    table, first = found.table("Losses and metrics along the paths"), len(barrier["curves"][0]["points"])
    assert table.column("f1") == ["–"] * first + [0.25 + point["at"] for point in points]
    accuracy = [point["metrics"]["accuracy"] for point in barrier["curves"][0]["points"]]
    assert table.column("accuracy") == accuracy + ["–"] * len(points)
    assert any(text == f"f1 along the paths: {barrier['curves'][1]['name']} 0.25 to 1.25." for text in found.texts)


# -- landscapes ------------------------------------------------------------------------------------


def test_the_grid_is_not_turned(tmp_path: Path, plane: dict[str, Any]) -> None:
    expected = [(x, y, plane["loss"][i][j]) for i, y in enumerate(plane["ys"]) for j, x in enumerate(plane["xs"])]
    spec = landscape_chart(plane)
    cells = spec["data"]["values"]
    assert [(cell["at x"], cell["at y"], cell["loss"]) for cell in cells] == expected
    for cell in cells:
        assert (cell["x"] + cell["x2"]) / 2 == pytest.approx(cell["at x"])
        assert (cell["y"] + cell["y2"]) / 2 == pytest.approx(cell["at y"])
    assert [spec["encoding"][one]["field"] for one in "xy"] == ["x", "y"]
    models = spec["layer"][-1]["data"]["values"]
    assert [(m["key"], m["x"], m["y"], m["loss"]) for m in models] == [
        (key, m["x"], m["y"], m["loss"]) for key, m in zip("ABC", plane["models"], strict=True)
    ]
    found = shown(tmp_path, plane)
    losses = [loss for _, _, loss in expected] + [model["loss"] for model in plane["models"]]
    assert found.texts[0].endswith(f"is between {min(losses):.4f} and {max(losses):.4f}.")
    grid = found.table("Losses on the grid")
    assert list(zip(*(grid.column(one) for one in ("x", "y", "loss")), strict=True)) == expected
    accuracy = plane["metrics"]["accuracy"]
    assert grid.column("accuracy") == [value for row in accuracy for value in row]
    table = found.table("The models in the plane")
    for key in ("x", "y", "loss"):
        assert table.column(key) == [model[key] for model in plane["models"]]
    assert table.column("accuracy") == [model["metrics"]["accuracy"] for model in plane["models"]]


def test_lines_are_in_the_picture(plane: dict[str, Any]) -> None:
    """Of a plane that rises to the right alone they are upright."""
    run = plane | {"loss": [list(plane["xs"]) for _ in plane["ys"]]}
    for line in landscape_chart(run)["layer"][1:3]:
        for point in line["data"]["values"]:
            assert point["x"] == pytest.approx(point["loss"])
            assert plane["ys"][0] <= point["y"] <= plane["ys"][-1]


def test_models_with_different_metrics(tmp_path: Path, plane: dict[str, Any]) -> None:
    run = broken(plane, "models", 1, "metrics", value={"f1": 0.5})
    found = shown(tmp_path, run)
    table = found.table("The models in the plane")
    assert table.column("f1") == ["–", 0.5, "–"]
    assert table.column("accuracy")[1] == "–"
    fields = {tip["title"]: tip["field"] for tip in found.specs[0]["layer"][-1]["layer"][0]["encoding"]["tooltip"]}
    models = found.specs[0]["layer"][-1]["data"]["values"]
    assert [model[fields["f1"]] for model in models] == [None, 0.5, None]


def test_a_plane_without_a_number(tmp_path: Path, plane: dict[str, Any]) -> None:
    run = plane | {"loss": [[math.nan for _ in row] for row in plane["loss"]]}
    run["models"] = [model | {"loss": math.nan} for model in plane["models"]]
    assert "is nowhere finite" in shown(tmp_path, run).texts[0]


# -- metrics, time and memory ----------------------------------------------------------------------


def test_the_best_model_stands_out(tmp_path: Path, documents: Documents) -> None:
    models = documents["evaluation"]["models"]
    assert models[0]["loss"] < models[1]["loss"]
    assert models[0]["metrics"]["accuracy"] > models[1]["metrics"]["accuracy"]
    table = next(t for t in shown(tmp_path, documents["evaluation"]).tables if "loss" in t.head)
    assert table.best == {(0, "loss"), (0, "accuracy")}  # both have the same f1
    assert table.column("loss") == [model["loss"] for model in models]
    assert table.column("counted") == ["40", "40"]


def test_models_may_have_different_metrics_in_an_evaluation(tmp_path: Path, documents: Documents) -> None:
    run = broken(documents["evaluation"], "models", 1, "metrics", value={"f1": 0.5})
    table = next(t for t in shown(tmp_path, run).tables if "loss" in t.head)
    assert table.column("f1") == ["–", 0.5]
    assert table.column("accuracy")[1] == "–"


@pytest.mark.parametrize("kind", ["barrier", "landscape", "evaluation"])
@pytest.mark.parametrize("name", ["loss", "model", "λ", "x", "counted", "alignment", "loss (nats)"])
def test_metrics_may_have_any_name(kind: str, name: str, tmp_path: Path, documents: Documents) -> None:
    text = json.dumps(documents[kind])
    run = json.loads(text.replace('"accuracy"', json.dumps(name)).replace('"<b>f1</b>"', json.dumps(f"metric {name}")))
    found = shown(tmp_path, run)
    for table in found.tables:
        assert len(set(table.head)) == len(table.head)
    title, own = {
        "barrier": ("Losses and metrics along the paths", {"alignment", "λ", "loss"}),
        "landscape": ("The models in the plane", {"model", "x", "y", "loss"}),
        "evaluation": ("masked-lm", {"model", "loss", "counted"}),
    }[kind]
    scores = [point for curve in run["curves"] for point in curve["points"]] if kind == "barrier" else run["models"]
    table = found.table(title)
    assert table.column("loss") == [score["loss"] for score in scores]
    first, second = (one for one in table.head if one not in own)
    assert table.column(first) == [score["metrics"][name] for score in scores]
    assert table.column(second) == [score["metrics"][f"metric {name}"] for score in scores]
    for spec in found.specs:
        for layer in spec["layer"]:
            tips = [tip["title"] for tip in layer.get("encoding", {}).get("tooltip", []) if "title" in tip]
            assert len(set(tips)) == len(tips)


def test_time_and_memory(tmp_path: Path, documents: Documents) -> None:
    table = shown(tmp_path, documents["alignment"]).table("Cost")
    assert table.column("seconds") == [1.25]
    assert table.column("peak memory (MiB)") == [300.0]  # of 300 · 2²⁰ bytes


# -- how exactly -----------------------------------------------------------------------------------


def test_outputs_that_are_not_equal_are_an_alert(tmp_path: Path, documents: Documents) -> None:
    run = broken(documents["alignment"], "verified", "equal", value=False)
    run["verified"]["errors"] = {"last_hidden_state": 0.03, "pooler_output": 0.2}
    for document in (run, documents["merge"] | {"alignments": [run]}):
        found = shown(tmp_path, document)
        assert len(found.alerts) == 2  # above all, and where it belongs
        assert found.texts[0] == found.alerts[0] == found.alerts[1]
        assert found.alerts[0].startswith("NOT EQUAL: ")
        assert "they differ by 2·10⁻¹, where 1·10⁻¹² is allowed" in found.alerts[0]
        assert not any("stay equal" in text for text in found.texts)


@pytest.mark.parametrize(
    ("verified", "text", "alerts"),
    [
        ({"errors": {"x": 3e-15, "y": 1e-15}, "equal": True, "rounding": 2e-7}, "stay equal to 3·10⁻¹⁵ before", 0),
        ({"errors": {"x": 3e-15}}, "stay equal to 3·10⁻¹⁵ before the weights are rounded.", 0),
        ({"errors": {"x": 1e-15, "y": math.nan}}, "they differ by inf", 2),
        ({"errors": {}, "equal": False}, "by an unknown amount", 2),
        ({"errors": {}}, "was not checked", 0),
        (None, "was not checked", 0),
    ],
)
def test_what_is_said_of_a_proof(verified: Any, text: str, alerts: int, tmp_path: Path, documents: Documents) -> None:
    found = shown(tmp_path, documents["alignment"] | {"verified": verified})
    assert len(found.alerts) == alerts
    assert any(text in one for one in found.texts)


@pytest.mark.parametrize(
    ("verified", "text"),
    [
        (None, "By how much its outputs differ was not checked."),
        ({"errors": {"x": 0.2}, "equal": False, "tolerance": 1e-12}, "and they differ by 2·10⁻¹"),
        ({"errors": {"x": 0.0}, "equal": True}, "and they differ by 0"),
    ],
)
def test_an_inexact_alignment_is_an_alert_that_names_its_variants(
    verified: Any, text: str, tmp_path: Path, documents: Documents
) -> None:
    run = documents["alignment"] | {"inexact": ["heads-ignored", "separate-qk"], "verified": verified}
    for document in (run, documents["merge"] | {"alignments": [run]}):
        found = shown(tmp_path, document)
        assert len(found.alerts) == 2
        assert found.texts[0] == found.alerts[0] == found.alerts[1]
        assert "aligned under heads-ignored and separate-qk, which is inexact" in found.alerts[0]
        assert text in found.alerts[0]
        assert not any("stay" in one for one in found.texts)


def test_a_path_under_an_inexact_alignment_is_marked(tmp_path: Path) -> None:
    source, anchor = (MODELS["bert"](seed) for seed in (0, 1))
    inexact = api.match(source, anchor, axes="attention", variants=("heads-ignored",))
    exact = api.match(source, anchor, axes="ffn")
    curves = api.barrier(source, anchor, lambda _: 0.0, {"mixed": inexact, "ffn": exact}, points=3).to_dict()
    assert [curve.get("inexact") for curve in curves["curves"]] == [None, ["heads-ignored"], None]
    found = shown(tmp_path, curves)
    assert found.texts[0] == found.alerts[0] == found.alerts[1]
    assert len(found.alerts) == 2
    assert found.alerts[0].startswith("INEXACT: on the path mixed the end at λ = 1 is not ")
    assert "aligned under heads-ignored" in found.alerts[0]
    inexact.save(tmp_path / "alignment.safetensors")
    (alert,) = Reader(page([tmp_path / "alignment.safetensors"])).alerts
    assert alert.startswith("INEXACT: ")
    assert alert.endswith(" was made under heads-ignored.")


@pytest.mark.parametrize("inexact", ["heads-ignored", [1]])
def test_variants_are_a_list_of_names(inexact: Any, tmp_path: Path, documents: Documents) -> None:
    for document in (documents["alignment"] | {"inexact": inexact}, copy.deepcopy(documents["barrier"])):
        if document["kind"] == "barrier":
            document["curves"][0]["inexact"] = inexact
        with pytest.raises(CheckpointError, match="'inexact'"):
            shown(tmp_path, document)


# -- correspondences -------------------------------------------------------------------------------


def test_the_picture_of_a_permutation_is_not_that_of_its_inverse() -> None:
    index = torch.tensor([2, 0, 1, 3, 5, 6, 4])
    spec = reordering_chart([Reordering("ffn", "layer 0", torch.arange(7)), Reordering("ffn", "layer 1", index)])
    second = [value for value in spec["data"]["values"] if value["p"] == 1]
    assert {(value["x"], value["y"]) for value in second} == {(source, i) for i, source in enumerate(index.tolist())}
    assert spec["encoding"]["y"]["scale"]["reverse"]  # the first of the anchor is at the top
    for one, title in (("x", "neuron of the source"), ("y", "neuron of the anchor")):
        assert (spec["encoding"][one]["field"], spec["encoding"][one]["title"]) == (f"{one}1", title)


def test_the_picture_of_rotations_has_each_at_its_place() -> None:
    turns = [Turn("v", "head", layer, str(at), 10.0 * layer + at, 1.0) for layer in (0, 1) for at in range(3)]
    spec = turn_chart(turns)
    assert [(v["layer"], v["at"], v["degrees"]) for v in spec["data"]["values"]] == [
        (str(layer), str(at), 10 * layer + at) for layer in (0, 1) for at in range(3)
    ]
    assert [(spec["encoding"][one]["field"], spec["encoding"][one]["title"]) for one in "xy"] == [
        ("at", "head"), ("layer", "layer"),
    ]  # fmt: skip


def test_what_is_turned_and_what_is_moved(tmp_path: Path) -> None:
    spec = canonical(Model.of(MODELS["gpt2-lm"](0)), ROTATABLE).spec
    alignment = random_alignment(spec, 0, axes=("residual", "v", "h", "ffn"))
    assert [turn.noun for turn in correspondence(alignment).turns["residual"]] == ["stream"]
    alignment.save(tmp_path / "alignment.safetensors")
    found = Reader(page([tmp_path]))
    said = " ".join(found.texts)
    assert "residual: 1 stream turned by " in said
    assert "residual: 1 head" not in said
    heads, layers = spec.axes["h"].size, spec.axes["l"].size
    assert f"v: {heads * layers} heads turned by " in said
    assert f"of {spec.axes['ffn'].size * layers} neurons have another position" in said
    assert f"of {heads * layers} heads have another position" in said
    table = found.table("Rotation of each head (v)")
    assert table.head == ["layer", "head", "degrees", "scale"]


@pytest.mark.parametrize("layers", [None, "0"])
def test_maps_that_stretch_say_so(layers: str | None, tmp_path: Path) -> None:
    source, anchor = (MODELS["bert"](seed) for seed in (0, 1))
    found = api.match(source, anchor, axes="attention", groups={"attention": "invertible"}, layers=layers)
    found.save(tmp_path / "alignment.safetensors")
    read = Reader(page([tmp_path]))
    for axis in ("qk", "v"):
        turns = correspondence(found).turns[axis]
        assert len(turns) == 8
        worst = max(turn.condition for turn in turns)
        (said,) = (text for text in read.texts if text.startswith(f"{axis}: "))
        assert said.startswith(f"{axis}: 8 heads turned by ")
        assert said.endswith(
            f" {max(t.degrees for t in turns):.2f}, and stretched: condition number {worst:.4g} at most."
        )
        table = read.table(f"Rotation of each head ({axis})")
        assert table.column("degrees") == [turn.degrees for turn in turns]
        assert table.column("condition number") == [turn.condition for turn in turns]
        tips = turn_chart(turns)["encoding"]["tooltip"]
        assert [tip["title"] for tip in tips if tip["field"] == "cond"] == ["condition number"]
    assert "the rotation is its polar factor" in " ".join(read.texts)


def test_what_is_no_head_and_no_neuron_is_a_unit(tmp_path: Path) -> None:
    spec = Model.of(MODELS["bert"](0)).spec
    random_alignment(spec, 0, axes=("residual",)).save(tmp_path / "alignment.safetensors")
    assert f"of {spec.axes['residual'].size} units have another position" in " ".join(Reader(page([tmp_path])).texts)
