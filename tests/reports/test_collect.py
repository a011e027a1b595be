"""What a run is, and what is said of everything else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from reports.reading import broken
from symfuse.errors import CheckpointError
from symfuse.reports.collect import FILES, collect, read
from symfuse.reports.shapes import SHAPES, misfit

Documents = dict[str, dict[str, Any]]


def test_a_folder_gives_all_that_it_holds(runs: Path, documents: Documents) -> None:
    found = collect([runs])
    assert {kind: len(some) for kind, some in found.documents.items()} == {
        "alignment": 0, "merge": 1, "distance": 1, "barrier": 1, "landscape": 1, "evaluation": 1,
    }  # fmt: skip
    assert found.documents["barrier"] == [documents["barrier"]]
    assert found.alignments == [documents["alignment"]]  # that of the merge
    assert [path.name for path in found.elements] == ["alignment-1.safetensors", "alignment-2.safetensors"]


def test_what_is_named_twice_is_shown_once(runs: Path) -> None:
    twice = collect([runs, runs / "barrier.json", runs])
    assert len(twice.documents["barrier"]) == 1
    assert list(collect([runs / "barrier.json"]).documents["barrier"]) == twice.documents["barrier"]


@pytest.mark.parametrize("kind", SHAPES)
def test_what_the_verbs_write_has_its_shape(kind: str, documents: Documents) -> None:
    assert misfit(documents[kind], SHAPES[kind]) is None


def test_there_must_be_a_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder or file"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as error:
        collect([tmp_path])
    assert str(tmp_path) in str(error.value)
    assert all(name in str(error.value) for name in FILES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[]", "holds list, expected a JSON object"),
        (b"{}", "it has no 'kind', such as alignment"),
        (b'{"kind": 3}', "it has no 'kind', such as alignment"),
        (b'{"kind": "tokenizer"}', "no page shows a run of kind 'tokenizer'; expected one of alignment"),
        (b'{"kind": "barrier"}', "as a run of kind 'barrier', it has no 'source'"),
    ],
)
def test_foreign_and_broken_files_are_named(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "barrier.json").write_bytes(text)
    with pytest.raises(CheckpointError) as error:
        collect([tmp_path])
    assert str(tmp_path / "barrier.json") in str(error.value)
    assert message in str(error.value)


def test_a_broken_alignment_is_named(tmp_path: Path) -> None:
    (tmp_path / "alignment.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"alignment\.safetensors"):
        collect([tmp_path])


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("barrier", ("curves",), [], "it['curves'] is empty"),
        ("barrier", ("curves", 1, "points", 0, "loss"), "high", "it['curves'][1]['points'][0]['loss'] is str"),
        ("barrier", ("curves", 0, "points", 2, "metrics", "accuracy"), None, "['accuracy'] is null"),
        ("barrier", ("curves", 0, "at"), True, "['at'] is bool, expected int or float"),
        ("barrier", ("curves", 0, "at_over_mean"), "x", "it['curves'][0]['at_over_mean'] is str"),
        ("barrier", ("seconds",), [1.0], "it['seconds'] is list, expected int or float"),
        ("barrier", ("task", "data"), ["a"], "it['task']['data'] is list, expected str"),
        ("landscape", ("loss",), [[1.0, 2.0]], "it['loss'] has length 1, expected 9 as of 'ys'"),
        ("landscape", ("loss", 3), [1.0, 2.0], "it['loss'][3] has length 2, expected 9 as of 'xs'"),
        ("landscape", ("metrics", "accuracy"), [[1.0]], "it['metrics']['accuracy'] has length 1, expected 9"),
        ("landscape", ("metrics", "accuracy", 8), [1.0], "it['metrics']['accuracy'][8] has length 1, expected 9"),
        ("landscape", ("xs",), [1.0] * 9, "it['xs'] does not rise"),
        ("landscape", ("ys",), [*range(8), math.inf], "it['ys'] does not rise"),
        ("landscape", ("xs",), [1.0], "it['xs'] has length 1, expected 2 at least"),
        ("landscape", ("models", 0), "a", "it['models'][0] is str, expected an object"),
        ("alignment", ("distance", "by_axis"), {}, "it['distance']['by_axis'] is dict, expected a list"),
        ("alignment", ("distance", "by_axis", 0, "of_whole"), [0.5], "['of_whole'] has length 1, expected 2 at least"),
        ("alignment", ("verified",), {"errors": [1]}, "it['verified']['errors'] is list, expected an object"),
        ("alignment", ("verified", "errors", "x"), "y", "it['verified']['errors']['x'] is str"),
        ("alignment", ("verified", "equal"), 1, "it['verified']['equal'] is int, expected bool"),
        ("alignment", ("translated_biases",), "3", "it['translated_biases'] is str, expected int"),
        ("merge", ("alignments", 0, "matched", 0, "units"), 1.5, "['units'] is float, expected int"),
        ("distance", ("before",), 10**400, "it['before'] overflows float64"),
        ("evaluation", ("task",), {}, "it['task'] has no 'task'"),
        ("evaluation", ("models", 0, "count"), [1], "it['models'][0]['count'] is list, expected int"),
    ],
)
def test_damage_is_found_where_it_is(
    tmp_path: Path, documents: Documents, kind: str, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    (tmp_path / "x.json").write_text(json.dumps(broken(documents[kind], *path, value=value)))
    with pytest.raises(CheckpointError) as error:
        read(tmp_path / "x.json")
    assert message in str(error.value)
    assert f"as a run of kind {kind!r}" in str(error.value)
    assert str(tmp_path / "x.json") in str(error.value)


@pytest.mark.parametrize("missing", [False, True])
def test_what_older_runs_lack_may_be_missing_or_null(missing: bool, documents: Documents) -> None:
    run = json.loads(json.dumps(documents["alignment"]))
    for part in run["distance"]["by_axis"]:
        part.pop("of_whole")
    keys = ("verified", "seconds", "peak_memory", "translated_biases", "symfuse")
    run = {key: value for key, value in run.items() if key not in keys} | ({} if missing else dict.fromkeys(keys))
    assert misfit(run, SHAPES["alignment"]) is None
