"""The papers' tables as work that is kept: every study runs, goes on after a stop, says what it finds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import results
import run
import yaml
from config import Config
from study import STUDIES, Claim, Store, Study, better, mean_error, study_named, table

from symfuse.errors import OptionError

TINY = Path(__file__).parent / "tiny.yml"
LETTERS = "Now is the winter of our discontent made glorious summer by this sun of York;\n"
SLOW = (
    "zhang_table1", "zhang_table2", "zhang_table3", "zhang_figure3", "zhang_figure4", "zhang_figure5", "zhang_layers",
    "verma_table2", "verma_table3", "theus_table2", "theus_simplex", "theus_widths", "theus_iterations",
    "rebase", "relations",
)  # fmt: skip
TIMES = ("zhang_table3",)  # what is measured there is not the same twice


@pytest.fixture(scope="module", autouse=True)
def away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the texts of tiny.yml and a cache of its own, to be in."""
    folder = tmp_path_factory.mktemp("away")
    (folder / "plays").mkdir()
    (folder / "texts").mkdir()
    for i, part in enumerate(("train", "match", "test")):
        text = "".join(LETTERS[k:] + LETTERS[:k] for k in range(7 * i, 7 * i + 20))
        (folder / "plays" / f"{part}.txt").write_text(text, "utf-8")
        rows = "".join(f"{(2 * LETTERS[:-1])[3 * k + i :][:8].strip()},{'ab'[k % 2]}\n" for k in range(24))
        (folder / "texts" / f"words-{part}.csv").write_text(f"text,label\n{rows}", "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SYMFUSE_CACHE", str(folder / "cache"))
        yield folder


def tiny(name: str) -> Study:
    return study_named(name, Config.read(str(TINY)))


@pytest.mark.parametrize("config", ["small", "paper", str(TINY)])
def test_every_study_is_in_every_config(config: str) -> None:
    found = Config.read(config)
    assert sorted(found.studies) == sorted(STUDIES)
    for study in run.selected(found, ()):
        parts = list(study.parts())
        assert parts, study.name
        assert len(set(parts)) == len(parts), study.name
        assert [tuple(part) for part in json.loads(json.dumps(parts))] == parts, study.name
        known = {*found.families, *found.tuned}
        assert {name for name, _ in study.models()} <= known, study.name
        assert study.paper in results.PAPERS
        assert len(study.about) > 80


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in STUDIES])
def test_a_study_runs_and_goes_on(name: str, tmp_path: Path) -> None:
    study = tiny(name)
    store = Store.of(study, tmp_path)
    for part in study.parts():
        assert store.run(part, "a test") > 0
    rows = store.rows()
    assert len(store.done()) == len(rows)
    assert all(row["commit"] and row["cpu seconds"] >= 0 for row in rows)
    assert sum(store.run(part, "a test") for part in study.parts()) == 0

    # Stopped before the last row was made: that one is made again, and is the same.
    about = json.loads(store.file.read_text("utf-8"))
    lost = about["rows"].pop()
    store.file.write_text(json.dumps(about), "utf-8")
    assert sum(store.run(part, "a test") for part in study.parts()) == 1
    (again,) = (row for row in store.rows() if study.key(row) == study.key(lost))
    if name not in TIMES:
        assert without_times(again) == without_times(lost)

    tables, claims = study.tables(rows), study.claims(rows)
    assert "|---" in tables
    assert "nan" not in tables
    assert all(claim.says and claim.here and "nan" not in claim.here for claim in claims)
    study.draw(rows, tmp_path / "figure.svg")
    if type(study).draw is not Study.draw:
        assert (tmp_path / "figure.svg").read_text("utf-8").startswith("<?xml")


def without_times(row: Any) -> Any:
    if isinstance(row, dict):
        return {key: without_times(value) for key, value in row.items() if "seconds" not in key and key != "costs"}
    return row


class Counting(Study):
    """One row for each number of a part."""

    name, paper, title, about, keys = "counting", "zhang", "Counting: to three", "", ("part", "n")
    known = ("steps", "models", "pairs")

    def parts(self) -> Iterator[tuple[Any, ...]]:
        yield from (("a",), ("b",))

    def rows(self, part: tuple[Any, ...], done: Any) -> Iterator[dict[str, Any]]:
        yield from ({"part": part[0], "n": n, "square": n * n} for n in range(3) if (part[0], n) not in done)

    def tables(self, rows: Any) -> str:
        return table(["n", "square"], [[str(row["n"]), str(row["square"])] for row in rows])

    def claims(self, rows: Any) -> list[Claim]:
        return [Claim("squares grow", f"up to {max(row['square'] for row in rows)}", True)]


def counting(**options: Any) -> Counting:
    return Counting(Config("small", TINY, "cpu", {}, {}, {"counting": options}))


def test_rows_that_several_add_are_all_there(tmp_path: Path) -> None:
    store = Store.of(counting(), tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.add({"part": "c", "n": n, "square": n * n}, "test"), range(40)))
    assert sorted(row["n"] for row in store.rows()) == list(range(40))


def test_rows_of_other_options_are_refused(tmp_path: Path) -> None:
    Store.of(counting(steps=1), tmp_path).run(("a",), "test")
    with pytest.raises(OptionError, match=r"made with other options or models of counting .* delete it"):
        Store.of(counting(steps=2), tmp_path).run(("b",), "test")


def test_rows_of_models_that_were_made_otherwise_are_refused(tmp_path: Path) -> None:
    study = tiny("zhang_layers")
    Store.of(study, tmp_path).add({"family": "vit", "source": 0, "anchor": 1, "set": "none", "layer": -1}, "test")
    config = Config.read(str(TINY))
    longer = {**config.families, "vit": {**config.families["vit"], "steps": 4}}
    with pytest.raises(OptionError, match="other options or models of zhang_layers"):
        Store.of(study_named("zhang_layers", replace(config, families=longer)), tmp_path).rows()


def test_what_was_written_says_how_it_came_about(tmp_path: Path) -> None:
    store = Store.of(counting(steps=1), tmp_path)
    store.run(("a",), "python experiments/run.py counting")
    about = json.loads(store.file.read_text("utf-8"))
    assert about["command"] == "python experiments/run.py counting"
    assert about["options"] == {"steps": 1}
    assert {"symfuse", "torch", "transformers", "python", "machine", "config"} <= set(about)
    assert [path.name for path in store.file.parent.iterdir()] == ["counting.json"]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows of `Counting`, as the small config would have them, and with a document."""
    for module in (run, results):
        monkeypatch.setattr(module, "STUDIES", ("counting",))
        monkeypatch.setattr(module, "study_named", lambda _, config: Counting(config))
    for name in ("small", "long"):
        for part in ("a", "b"):
            Store.of(Counting(config_of(name)), tmp_path).run((part,), "test")
    text = "before\n<!-- table: counting of long -->\nold\n<!-- end of table -->\nafter\n"
    (tmp_path / "some.md").write_text(text, "utf-8")
    monkeypatch.setattr(results, "DOCS", tmp_path)
    monkeypatch.setattr(results, "DATA", tmp_path)
    return tmp_path


def config_of(name: str) -> Config:
    return Config(name, results.CONFIGS / f"{name}.yml", "cpu", {}, {}, {"counting": {}})


def test_the_page_counts_the_claims_and_links_to_the_tables(made: Path) -> None:
    results.write(config_of("small"), [], made)
    page = (made / "results.md").read_text("utf-8")
    assert "Of 1 claims 1 are confirmed, 0 do not hold here, and 0 are undecided." in page
    assert "[Counting: to three](#counting-to-three) | squares grow | up to 4 | yes |" in page
    assert "| 2 | 4 |" in page


def test_other_configs_fill_the_marks_of_documents(made: Path) -> None:
    results.write(config_of("long"), [Counting(config_of("long"))], made)
    text = (made / "some.md").read_text("utf-8")
    assert "| 2 | 4 |" in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert not (made / "results.md").exists()


def test_rows_elsewhere_have_their_page_beside_them(made: Path) -> None:
    config = config_of("small")
    for part in ("a", "b"):
        Store.of(Counting(config), made / "elsewhere").run((part,), "test")
    results.write(config, [], made / "elsewhere")
    page = (made / "elsewhere" / "small" / "results.md").read_text("utf-8")
    assert "elsewhere/small/counting.json" in page
    assert not (made / "results.md").exists()


def test_nothing_is_written_without_rows_or_with_too_few(made: Path) -> None:
    with pytest.raises(OptionError, match=r"there are no rows of .*; run without --write first"):
        results.write(config_of("small"), [], made / "elsewhere")
    assert not (made / "results.md").exists()
    Store.of(Counting(config_of("small")), made / "half").run(("a",), "test")
    with pytest.raises(
        OptionError, match=r"counting: 1 parts are not finished, such as b; run counting to the end first"
    ):
        results.write(config_of("small"), [], made / "half")
    assert not list((made / "half").rglob("*.md"))


def test_what_is_finished_is_not_begun_and_needs_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, begun = tiny("zhang_layers"), []
    monkeypatch.setattr(run, "_all", lambda _, work: begun.extend(work) or 0)
    *parts, last = study.parts()
    for part in parts:
        Store.of(study, tmp_path).add(None, "test", finished=part)
    assert run.run([study], tmp_path, 1, "test") == 0
    assert begun[-1] == f"zhang_layers {' '.join(map(str, last))}"
    assert sum(name.startswith("zhang_layers") for name in begun) == 1
    begun.clear()
    Store.of(study, tmp_path).add(None, "test", finished=last)
    assert run.run([study], tmp_path, 1, "test") == 0
    assert begun == []


def test_a_file_that_nobody_here_wrote_is_refused_by_its_name(tmp_path: Path) -> None:
    store = Store.of(counting(), tmp_path)
    store.run(("a",), "test")
    whole = store.file.read_text("utf-8")
    for broken in (whole[:-40], "", "[]", whole.replace('"n"', '"m"'), '{"rows": null}'):
        store.file.write_text(broken, "utf-8")
        with pytest.raises(OptionError, match=r"counting\.json is not what a run of counting wrote .*; restore it"):
            store.add({"part": "b", "n": 0}, "test")
        assert store.file.read_text("utf-8") == broken


def test_rows_that_cannot_be_kept_are_refused_before_any_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"rows cannot be kept in .*file/small .*; choose another --data"):
        Store.of(counting(), tmp_path / "file").require_writable()


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], "–"), ([1.5], "1.50"), ([1.0, 3.0], "2.00 ± 1.00"), ([1.0, 2.0, 3.0], f"2.00 ± {1 / math.sqrt(3):.2f}")],
)
def test_mean_and_standard_error(values: list[float], expected: str) -> None:
    assert mean_error(values) == expected


@pytest.mark.parametrize(
    ("gains", "holds"),
    [
        ([1.0, 1.1, 0.9], True),
        ([-1.0, -1.1, -0.9], False),
        ([1.0, -0.8, 0.3], None),
        ([-1.0, 0.1, 0.2], None),
        ([0.5], None),
        ([0.0, 0.0], False),
        # Means of 2.9 and 3.0 standard errors; with two degrees of freedom 2.92 are needed.
        ([2.9 - 3**0.5, 2.9, 2.9 + 3**0.5], None),
        ([3.0 - 3**0.5, 3.0, 3.0 + 3**0.5], True),
    ],
)
def test_a_gain_is_decided_by_students_test(gains: list[float], holds: bool | None) -> None:
    assert better(gains) is holds


def test_a_config_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(OptionError, match=r"there is no config 'huge': expected .*paper, small"):
        Config.read("huge")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("familys: {}", "'familys' is no key; there are .*families, tuned, studies"),
        ("- a", "expected a mapping with extends, device, .*, found list"),
        ("", "expected a mapping with extends, .*, found NoneType"),
        ("families: [", "is no YAML that can be read"),
        ("families: {a: {steps: 1, steps: 2}}", "has the key 'steps' twice"),
        ("studies: [a]", "studies: expected a mapping"),
        ("families: {vit: null}", "families: vit: expected a mapping, found None"),
        ("extends: {file}", "extends itself"),
        ("device: gpu", "device 'gpu' cannot be used"),
        ("studies: {zhang_layer: {}}", "studies: 'zhang_layer' is none; there are zhang_table1"),
        ("studies: {zhang_layers: {familys: {}}}", "zhang_layers: 'familys' is no option; there are families, pairs"),
        ("studies: {zhang_layers: {}}", "studies: zhang_layers: 'families' is missing"),
        ("studies: {zhang_layers: {families: {vit: {pairs: [[0, 1]], axis: ffn}}}}", "vit: 'axis' is no option"),
        ("studies: {zhang_layers: {families: {vit: {pairs: [[0]]}}}}", "vit: pairs: expected two different seeds"),
        ("studies: {zhang_layers: {families: {vit: {pairs: [[1, 1]]}}}}", "expected two different seeds"),
    ],
)
def test_a_config_that_is_wrong_is_refused_by_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some.yml"
    path.write_text(text.replace("{file}", str(path)), "utf-8")

    def read() -> None:
        config = Config.read(str(path))
        config.require_device()
        for study in run.selected(config, ()):
            list(study.parts())

    with pytest.raises(OptionError, match=f"some.yml.*{message}"):
        read()


def test_a_gain_too_small_to_be_called_one_is_none() -> None:
    assert better([0.001, 0.002, 0.0]) is None
    assert better([0.001, 0.002, 0.0], least=0.005) is False
    assert better([0.001, 0.002, 0.02], least=0.005) is None


@pytest.mark.slow  # processes that import torch
def test_what_fails_is_said_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(TINY.read_text("utf-8"))
    families = {"vit": {"pairs": [[0, 1]], "axes": ["ffn"]}, "absent": {"pairs": [[0, 1]], "axes": ["ffn"]}}
    config["studies"] = {"zhang_layers": {"families": families}}
    path = tmp_path / "some.yml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    studies = run.selected(Config.read(str(path)), ())
    assert run.run(studies, tmp_path, 1, "test") == 3  # two models and a part
    said = capsys.readouterr().err
    assert "FAILED zhang_layers absent 0 1: OptionError: families: no family is called 'absent'" in said
    assert sum("FAILED absent" in line and "as before" in line for line in said.splitlines()) == 1
    assert {row["family"] for row in Store.of(studies[0], tmp_path).rows()} == {"vit"}
