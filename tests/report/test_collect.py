"""What a run is, and what is said of everything else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from symfuse.errors import CheckpointError
from symfuse.report.collect import FILES, SHAPES, collect, misfit, read

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
        (b"", "not a JSON file"),
        (b"{", "not a JSON file"),
        (b"\xff\xfe{}", "not a JSON file"),
        (b"[" * 100_000, "not a JSON file"),
        (b"[]", "'kind' is missing"),
        (b"{}", "'kind' is missing"),
        (b'{"kind": 3}', "'kind' is 3"),
        (b'{"kind": "tokenizer"}', "'kind' is 'tokenizer', expected one of alignment"),
        (b'{"kind": "barrier"}', "as a barrier run, it has no 'source'"),
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


def broken(document: dict[str, Any], *path: str | int, value: Any) -> dict[str, Any]:
    """A copy with another value at a place."""
    made = copy.deepcopy(document)
    inner: Any = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("barrier", ("curves",), [], "it['curves'] is empty"),
        ("barrier", ("curves", 1, "points", 0, "loss"), "high", "it['curves'][1]['points'][0]['loss'] is str"),
        ("barrier", ("curves", 0, "points", 2, "metrics", "accuracy"), None, "['accuracy'] is NoneType"),
        ("barrier", ("curves", 0, "at"), True, "['at'] is bool, expected int or float"),
        ("landscape", ("loss",), [[1.0, 2.0]], "the grid of losses is not 9 by 9"),
        ("landscape", ("models", 0), "a", "it['models'][0] is not an object"),
        ("alignment", ("distance", "by_axis"), {}, "it['distance']['by_axis'] is not a list"),
        ("merge", ("alignments", 0, "matched", 0, "units"), 1.5, "['units'] is float, expected int"),
        ("evaluation", ("task",), {}, "it['task'] has no 'task'"),
    ],
)
def test_damage_is_found_where_it_is(
    tmp_path: Path, documents: Documents, kind: str, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    (tmp_path / "x.json").write_text(json.dumps(broken(documents[kind], *path, value=value)))
    with pytest.raises(CheckpointError) as error:
        read(tmp_path / "x.json")
    assert message in str(error.value)
    assert f"as a {kind} run" in str(error.value)
