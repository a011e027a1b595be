"""docs/results.md says what the rows say."""

from __future__ import annotations

import re
from statistics import fmean

import pytest
import results
import run
from config import Config
from study import DATA, Store


def made() -> str:
    studies = run.selected(Config.read("small"), ())
    found = {study: Store.of(study).rows() for study in studies}
    return "\n".join(results.page({study: rows for study, rows in found.items() if rows}, DATA))


def test_the_page_is_what_the_rows_make() -> None:
    said = "python experiments/run.py --write"
    assert (results.DOCS / results.PAGE).read_text("utf-8") == made(), f"docs/results.md is not of its rows: {said}"


def test_every_study_of_the_small_config_has_its_rows() -> None:
    """All parts were run: no table of the page is of some of the seeds."""
    for study in run.selected(Config.read("small"), ()):
        rows = Store.of(study).rows()
        assert rows, study.name
        assert not [row for row in rows if row["commit"].endswith("-dirty")], (
            f"{study.name}: made by code that nobody has"
        )


@pytest.mark.parametrize(("config", "studies"), [("long", ()), ("small", ("rebase",))], ids=str)
def test_documents_show_the_rows_of_studies(config: str, studies: tuple[str, ...]) -> None:
    for study in run.selected(Config.read(config), studies):
        mark = f"<!-- table: {study.name} of {config} -->"
        (text,) = (t for file in results.DOCS.glob("*.md") if mark in (t := file.read_text("utf-8")))
        shown = re.search(re.escape(mark) + r"\n\n(.*?)\n\n<!-- end of table -->", text, re.DOTALL)
        assert shown is not None
        assert shown[1] == study.tables(Store.of(study).rows()), f"run.py --config {config} --write {study.name}"


def test_rebase_says_what_its_study_found() -> None:
    """The shares that `symfuse rebase` prints are the means of the rows."""
    import rebase

    from symfuse.rebasing.relation import SHARES

    for config, case, kind in (("small", "apart", "trained apart"), ("long", "later", "trained on")):
        (study,) = run.selected(Config.read(config), ("rebase",))
        rows = rebase.of(Store.of(study).rows(), case, "g(τ), weights")
        assert {row["kind"] for row in rows} == {kind}
        assert round(fmean(rebase.shares(rows)), 2) == SHARES[kind]
