"""What objects print, what they are as data, and what goes to the log."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

import symfuse
from symfuse.cli import main
from symfuse.cli.command import OLD_NAMES
from symfuse.cli.verbs import VERBS
from symfuse.errors import SymfuseWarning, warn_caller
from symfuse.evaluation import Barrier, Curve, Distance, Point, Score
from symfuse.evaluation.distance import Gap, Piece
from symfuse.io import Checkpoint
from symfuse.output import Output
from symfuse.verification import Proof, Verification

VERIFICATION = Verification({"logits": 2e-15}, 1e-12, "seeded <inputs>", coverage={"wte": (3, 5)})
BARRIER = Barrier(
    "a",
    "b",
    {"task": "own"},
    {"none": Curve("none", (Point(0.0, Score(1.0)), Point(0.5, Score(3.0)), Point(1.0, Score(1.0))), 2.0)},
    {},
)
DISTANCE = Distance((Piece("w", "ffn", 0, Gap(4.0, 1.0, 4.0, 1.0)), Piece("x", "rest", -1, Gap())))
OBJECTS = {
    "Verification(equal, largest relative difference 2e-15, tolerance 1e-12, seeded <inputs>)": VERIFICATION,
    "Proof(largest relative difference 2e-15, rounding 3e-08, float32, seeded <inputs>)": Proof(
        VERIFICATION, 3e-8, "float32"
    ),
    "Barrier(a to b, own, barrier none 2)": BARRIER,
    "Distance(euclidean 2, relative 2, cosine 0.5)": DISTANCE,
    "Checkpoint('m', 0 tensors)": Checkpoint({}, {}, name="m"),
}


@pytest.mark.parametrize("text", OBJECTS)
def test_objects_print_short_and_as_a_table(text: str) -> None:
    assert repr(OBJECTS[text]) == text
    table = OBJECTS[text]._repr_html_()  # type: ignore[attr-defined]
    assert table.startswith(f"<table><caption>{text.partition('(')[0]}</caption><tr><th>")
    assert "<inputs>" not in table


def test_specs_and_alignments_print_short() -> None:
    from contract.tiny import MODELS

    source = MODELS["bert"](0)
    spec = symfuse.declare(source)
    assert repr(spec).startswith(f"Spec(bert, {len(spec.tensors)} tensors, ")
    assert len(repr(spec)) < 120
    assert "<tr><th>tensors</th>" in spec._repr_html_()
    assert repr(symfuse.Alignment(spec, {})) == "Alignment(bert, 0 elements, 0 translated biases)"


def keys(data: object) -> set[str]:
    """All keys but those of tables by name."""
    if isinstance(data, dict):
        named = {"errors", "coverage", "metrics", "left_of"}
        return {*data, *(key for name, value in data.items() if name not in named for key in keys(value))}
    return {key for value in data for key in keys(value)} if isinstance(data, list) else set()


@pytest.mark.parametrize(
    "data", [VERIFICATION, OBJECTS[list(OBJECTS)[1]], BARRIER, DISTANCE], ids=lambda one: type(one).__name__
)
def test_documents_have_a_version_and_snake_case_keys(data: Barrier) -> None:
    document = json.loads(json.dumps(data.to_dict(), allow_nan=False))
    assert document["schema"] == 1
    assert all(key.isidentifier() and key == key.lower() for key in keys(document)), keys(document)


def test_parts_of_a_distance_add_up() -> None:
    data = DISTANCE.to_dict()
    assert (data["euclidean"], data["by_axis"][0]) == (
        2.0,
        {"axis": "ffn", "squared": 4.0, "of_whole": 1.0, "cosine": 0.5},
    )
    assert data["by_layer"][0] == {"layer": -1, "squared": 0.0, "of_whole": 0.0, "cosine": None}


def test_notes_and_warnings_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "symfuse"), warnings.catch_warnings():
        warnings.simplefilter("ignore", SymfuseWarning)
        warn_caller("one\x1b[31m")
        Output(as_json=True, quiet=True).note("two")
        Output(as_json=True, quiet=True).say("three")
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("WARNING", "one\\x1b[31m"),
        ("INFO", "note: two"),
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_and_has_its_options_in_groups(verb: str) -> None:
    text = CliRunner().invoke(main, [verb, "--help"], terminal_width=79).output
    assert max(map(len, text.splitlines())) <= 79
    assert text.index("\nOutput:\n") > 0
    if verb in ("align", "merge", "barrier", "check"):
        assert "\nData:\n" in text
    if verb in ("align", "merge"):
        assert text.index("\nMatching:\n") > 0 < text.index("\nWriting:\n")


@pytest.mark.parametrize("old", OLD_NAMES)
@pytest.mark.parametrize("form", [[" drop"], ["=drop"]])
def test_an_old_name_of_an_option_prints_the_new_one(old: str, form: list[str]) -> None:
    words = f"{old}{form[0]}".split(" ")
    result = CliRunner().invoke(main, ["merge", "no-a", "no-b", "-o", "out", *words, "--layers", "tail:1"])
    assert f"note: {old} is now called {OLD_NAMES[old]}" in result.stderr
    assert "note: --layers tail:1 is now written last:1" in result.stderr


def test_documents_of_earlier_versions_are_read(tmp_path: Path) -> None:
    from symfuse.reports.collect import read

    curve = BARRIER.curves["none"].to_dict() | {"left_of": {"none": None}}
    document = BARRIER.to_dict() | {"curves": [curve]}
    old = {name: {"barrier_over_mean": "barrier over mean", "left_of": "left of"}.get(name, name) for name in curve}
    earlier = document | {"curves": [{old[name]: value for name, value in curve.items()}], "peak memory": 5}
    earlier["curves"][0]["at over mean"] = earlier["curves"][0].pop("at_over_mean")
    for name, data in (("old.json", earlier), ("new.json", document | {"peak_memory": 5})):
        (tmp_path / name).write_text(json.dumps(data), "utf-8")
    assert read(tmp_path / "old.json") == read(tmp_path / "new.json")
