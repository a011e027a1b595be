"""docs/results.md, from the rows of the studies: python experiments/run.py --write"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pairs
from study import Claim, Row, Store, Study

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "results.md"
FIGURES = DOCS / "images" / "results"
PAPERS = {
    "zhang": "Zhang, Zheng, Chen, Li 2025: Beyond the Permutation Symmetry of Transformers",
    "theus": "Theus, Cabodi, Anagnostidis, Orvieto, Singh, Boeva 2025: Generalized Linear Mode Connectivity",
    "verma": "Verma, Elbayad 2024: Merging Text Transformer Models from Different Initializations",
}
SAID = {True: "yes", False: "**no**", None: "undecided"}
HEAD = """# The papers' tables, made again

Written by `python experiments/run.py --write` from the rows in `experiments/data/small/`; do not edit.
`make experiments` makes the rows: models small enough to be trained and merged on two cores, on real images and text,
and published checkpoints where a package carries some. So shares and signs may be compared with the papers' figures,
not their heights. The papers' own scale is `--config paper`, the same code with models of the hub on a GPU; it was
**never run** here. Figures of the papers are those that we have from them and checked; where a cell is a dash, we have
none. ± is the standard error of the mean over seeds, or over pairs of seeds.

"Is it so?" is decided by the rows. That something gains is confirmed if the mean gain over pairs or seeds is above
nothing, and not so if it is below, each by Student's one-sided test at 5 %, or if nothing changes at all; else it is
undecided, which three pairs often leave it. Of a hundred such verdicts five are expected by chance, and pairs that
share a model are counted as if they did not. Claims that name a threshold (no barrier, settled, a share of time) are
decided by the mean alone.
"""


def write(studies: Sequence[Study], data: Path) -> None:
    """The page and figures of the small config; of others the tables between their marks in documents, and the figures
    that these name."""
    found = {study: Store.of(study, data).rows() for study in studies}
    found = {study: rows for study, rows in found.items() if rows}
    if all(study.config.name == "small" for study in studies):
        for study, rows in found.items():
            study.draw(rows, FIGURES / f"{study.name}.svg")
        PAGE.write_text("\n".join(page(found, data)), "utf-8")
        return
    for file in DOCS.glob("*.md"):
        for study, rows in found.items():
            mark = f"<!-- table: {study.name} of {study.config.name} -->"
            if mark in file.read_text("utf-8"):
                pairs.write(file, study.tables(rows), (mark, "<!-- end of table -->"))
            figure = FIGURES / study.config.name / f"{study.name}.svg"
            if figure.relative_to(DOCS).as_posix() in file.read_text("utf-8"):
                study.draw(rows, figure)


def page(found: dict[Study, list[Row]], data: Path) -> Iterator[str]:
    claims = {study: study.claims(rows) for study, rows in found.items()}
    yield HEAD
    yield _counted([claim for some in claims.values() for claim in some])
    yield "\n| paper | claim | here | is it so? |\n|---|---|---|---|"
    for study, some in claims.items():
        for claim in some:
            yield f"| [{study.title}](#{_anchor(study)}) | {claim.says} | {claim.here} | {SAID[claim.holds]} |"
    for paper, title in PAPERS.items():
        own = {study: rows for study, rows in found.items() if study.paper == paper}
        yield f"\n## {title}" if own else ""
        for study, rows in own.items():
            yield from _section(study, rows, Store.of(study, data).file)
    yield ""


def _section(study: Study, rows: list[Row], file: Path) -> Iterator[str]:
    yield f"\n### {study.title}\n\n{study.about.strip()}\n\n{study.tables(rows)}"
    figure = FIGURES / f"{study.name}.svg"
    if figure.exists():
        yield f"\n![{study.title}]({figure.relative_to(DOCS).as_posix()})"
    about = json.loads(file.read_text("utf-8"))
    spent, commits = sum(row["cpu seconds"] for row in rows), sorted({row["commit"] for row in rows})
    yield (
        f"\n`{about['command']}`: {len(rows)} rows, {spent / 60:.1f} minutes of one core, commit {', '.join(commits)}, "
        f"torch {about['torch']}, transformers {about['transformers']}, {about['machine']}; "
        f"`experiments/data/{study.config.name}/{study.name}.json`."
    )


def _counted(claims: Sequence[Claim]) -> str:
    counts = [sum(claim.holds is held for claim in claims) for held in (True, False, None)]
    return "Of {} claims {} are confirmed, {} are not so here, and {} are undecided.".format(len(claims), *counts)


def _anchor(study: Study) -> str:
    """As GitHub makes it from a heading."""
    return re.sub(r"[^\w\- ]", "", study.title.lower()).replace(" ", "-")
