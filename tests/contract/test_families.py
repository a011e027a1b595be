"""The table of all families is made from the declarations, says why of every axis, and is what the docs show."""

from __future__ import annotations

from typing import Any

import pytest

from command import done, run
from contract.moved import PAGE
from contract.tiny import MODELS, marked, model_of
from symfuse.architectures import ARCHITECTURES
from symfuse.reports.families import families, markdown, reasons, rows

Table = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def table() -> Table:
    return {one["family"]: one for one in families()}


def test_every_family_is_there_and_every_axis_has_a_reason(table: Table) -> None:
    assert table.keys() == ARCHITECTURES.keys()
    for name, one in table.items():
        assert one["moved"], name
        for axis in [*one["moved"], *one["not_moved"]]:
            assert axis["why"], (name, axis)


@pytest.mark.parametrize("label", marked(MODELS))
def test_it_is_what_the_declaration_of_a_model_says(label: str, table: Table) -> None:
    """Where a model has an axis that is in the table, and its config does not choose otherwise, the groups agree."""
    spec = model_of(label).spec
    listed = {axis["axis"]: axis["group"] for axis in table[spec.family]["moved"]}
    common = {i.axis for i in spec.movable} & listed.keys()
    assert common
    assert all(spec.axes[axis].group is not None for axis in common)


def test_known_reasons(table: Table) -> None:
    def why(family: str, axis: str) -> str:
        one = table[family]
        return str(next(a["why"] for a in [*one["moved"], *one["not_moved"]] if a["axis"] == axis))

    assert "ALiBi" in why("bloom", "h")
    assert "normalised" in why("qwen3", "c")
    assert "reordered only" in why("bert", "residual")
    assert "one row per token" in why("llama", "vocab")
    assert table["bert"]["residual_once_folded"] is None
    assert table["llama"]["residual_once_folded"] == "rotation"
    assert table["gpt2"]["residual_once_folded"] == "rotation that keeps the mean"
    assert table["bloom"]["biases"] == ["keys free", "values move on into the output"]


def test_the_page_is_up_to_date(table: Table) -> None:
    assert PAGE.read_text("utf-8") == markdown(list(table.values())), "run `make moved`"


def test_families_that_agree_share_a_row(table: Table) -> None:
    found = list(table.values())
    names = [name for row in rows(found) for name in row[0].split(", ")]
    assert sorted(names) == sorted(table)
    assert len(rows(found)) < len(table)
    assert len({tuple(row[:4]) for row in reasons(found)}) == len(reasons(found))


def test_on_the_command_line(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symfuse.reports.families.families", lambda: list(table.values()))
    said = done("inspect", "--families").stdout
    assert "qwen3" in said
    assert "ALiBi" in said
    assert '"family": "bloom"' in done("inspect", "--families", "--json").stdout
    for arguments in (("inspect",), ("inspect", "model", "--families")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "either one MODEL or --families" in result.stderr
