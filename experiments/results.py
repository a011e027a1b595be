"""docs/results.md, from the rows of the studies: python experiments/run.py --write"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pairs
from config import CONFIGS, Config
from study import DATA, STUDIES, Claim, Row, Store, Study, study_named

from symfuse.errors import OptionError

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURES = Path("results.md"), Path("images") / "results"  # in DOCS
PAPERS = {
    "zhang": "Zhang, Zheng, Chen, Li 2025: Beyond the Permutation Symmetry of Transformers",
    "theus": "Theus, Cabodi, Anagnostidis, Orvieto, Singh, Boeva 2025: Generalized Linear Mode Connectivity",
    "verma": "Verma, Elbayad 2024: Merging Text Transformer Models from Different Initializations",
    "own": "Further studies",
}
SAID = {True: "yes", False: "**no**", None: "undecided"}
HEAD = """# The papers' tables and figures, reproduced at small scale

Written by `python experiments/run.py --write` from the rows that each section names; do not edit. `make experiments`
makes the rows: models small enough to be trained and merged on two cores, on real images and text, and published
checkpoints where a package carries some. So shares and signs may be compared with the papers' figures, not absolute
values. The papers' own scale is `--config paper`, the same code with models of the hub on a GPU; it was **never run**
here. Figures of the papers are those that we have from them and checked; a dash means that we have none. ± is the
standard error of the mean over seeds, or over pairs of seeds.

The rows decide each claim ("holds?"). A gain is confirmed ("yes") if the mean gain over pairs or seeds is above
zero, and rejected ("no") if it is below zero, each by Student's one-sided test at 5 %. It is also rejected if nothing
changes at all (in Table 1 of Zhang et al. also if that test excludes half a point). Otherwise it is undecided, as it
often is with three pairs. Of a hundred such verdicts five are expected by chance. Pairs that share a model are
counted as independent. Claims that no barrier is left, or that little is gained, are decided by the same test, of
the distance from their threshold. Other thresholds (settled, a share of time) are decided by the mean alone.
"""


def write(config: Config, studies: Sequence[Study], data: Path) -> None:
    """The page and figures of the small config, of all its studies that have rows, whichever were chosen, in docs/; its
    tables also between their marks in other documents. Of rows that are kept elsewhere, and of configs of one's own,
    beside the rows. Of the other configs here the tables between their marks in documents, and the figures that these
    name. Raises OptionError if there are no rows, or those of a study are not all there."""
    small = config.path == CONFIGS / "small.yml"
    if small:
        studies = [study_named(name, config) for name in STUDIES if name in config.studies]
    rows_by_study = {study: rows for study in studies if (rows := Store.of(study, data).rows())}
    if not rows_by_study:
        raise OptionError(f"there are no rows of {config.path} in {data / config.name}; run without --write first")
    for study in rows_by_study:
        if parts := Store.of(study, data).unfinished():
            raise OptionError(
                f"{study.name}: {len(parts)} parts are not finished, such as {' '.join(map(str, parts[0]))}; run "
                f"{study.name} to the end first, without --write"
            )
    if small and data == DATA:
        _write_page(rows_by_study, data, DOCS)
        _fill(rows_by_study, config.name)
    elif data != DATA or config.path.parent != CONFIGS:
        _write_page(rows_by_study, data, data / config.name)
    else:
        _fill(rows_by_study, config.name)


def _write_page(rows_by_study: dict[Study, list[Row]], data: Path, to: Path) -> None:
    for study, rows in rows_by_study.items():
        study.draw(rows, to / FIGURES / f"{study.name}.svg")
    (to / PAGE).write_text("\n".join(page(rows_by_study, data)), "utf-8")
    print(f"written: {to / PAGE}")


def _fill(rows_by_study: dict[Study, list[Row]], config: str) -> None:
    """Put tables and figures in the documents that have marks for them."""
    for file in DOCS.glob("*.md"):
        for study, rows in rows_by_study.items():
            mark, figure = f"<!-- table: {study.name} of {config} -->", FIGURES / config / f"{study.name}.svg"
            if mark in file.read_text("utf-8"):
                pairs.write(file, study.tables(rows), (mark, "<!-- end of table -->"))
                print(f"written: {study.name} in {file}")
            if figure.as_posix() in file.read_text("utf-8"):
                study.draw(rows, DOCS / figure)


def page(rows_by_study: dict[Study, list[Row]], data: Path) -> Iterator[str]:
    claims = {study: study.claims(rows) for study, rows in rows_by_study.items()}
    yield HEAD
    for reading in {
        data / study.config.name / "reading.md" for study in rows_by_study
    }:  # written by hand, after the rows
        yield f"\n{reading.read_text('utf-8').strip()}" if reading.exists() else ""
    yield f"\n## Claims\n\n{_counted([claim for some in claims.values() for claim in some])}"
    yield "\n| paper | claim | here | holds? |\n|---|---|---|---|"
    for study, some in claims.items():
        for claim in some:
            yield f"| [{study.title}](#{_anchor(study)}) | {claim.says} | {claim.here} | {SAID[claim.holds]} |"
    for paper, title in PAPERS.items():
        own = {study: rows for study, rows in rows_by_study.items() if study.paper == paper}
        yield f"\n## {title}" if own else ""
        for study, rows in own.items():
            yield from _section(study, rows, Store.of(study, data).file)
    yield ""


def _section(study: Study, rows: list[Row], file: Path) -> Iterator[str]:
    yield f"\n### {study.title}\n\n{study.about.strip()}\n\n{study.tables(rows)}"
    if type(study).draw is not Study.draw:
        yield f"\n![{study.title}]({(FIGURES / study.name).as_posix()}.svg)"
    about = json.loads(file.read_text("utf-8"))
    spent, commits = sum(row["cpu seconds"] for row in rows), sorted({row["commit"] for row in rows})
    yield (
        f"\n`{about['command']}`: {len(rows)} rows in {spent / 60:.1f} minutes of one core, the training of the models "
        f"not counted; commit {', '.join(commits)}, torch {about['torch']}, transformers {about['transformers']}, "
        f"{about['machine']}; `{_named(file)}`."
    )


def _named(file: Path) -> str:
    root = DATA.parents[1]
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.as_posix()


def _counted(claims: Sequence[Claim]) -> str:
    counts = [sum(claim.holds is held for claim in claims) for held in (True, False, None)]
    return "Of {} claims {} are confirmed, {} do not hold here, and {} are undecided.".format(len(claims), *counts)


def _anchor(study: Study) -> str:
    """As GitHub makes it from a heading."""
    return re.sub(r"[^\w\- ]", "", study.title.lower()).replace(" ", "-")
