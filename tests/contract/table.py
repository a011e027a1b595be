"""Writes docs/families.md and the table of README.md: every architecture × symmetry × measured error.

    make table

Each entry is the largest change of the outputs of the real class, relative to the largest output, in float64, when
random elements of that symmetry act (seed 1) on a tiny random model.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformers
from tiny import MODELS

import symfuse

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "query/key": {"qk"},
    "value/output": {"v"},
    "feed-forward": {"ffn"},
    "heads": {"h"},
    "residual": {"residual", "emb"},
}


def row(label: str) -> list[str]:
    checkpoint = MODELS[label]()
    spec = symfuse.declare(checkpoint)
    cells = [label, str(checkpoint.name)]
    groups = []
    for axes in [*COLUMNS.values(), None]:
        present = {i.axis for i in spec.movable} & (axes or set(spec.axes))
        if not present:
            cells.append("–")
            continue
        alignment = symfuse.random_alignment(spec, 1, axes=None if axes is None else present)
        error = symfuse.verify(checkpoint, alignment(checkpoint), alignment).worst
        cells.append(f"{error:.0e}")
        groups += [f"{a}: {g.name}" for a in sorted(present) if (g := spec.axes[a].group)] if axes is None else []
    free = any(s.into is None for s in spec.shifts)
    folded = any(s.into is not None for s in spec.shifts)
    cells.append(", ".join(w for w, on in (("key free", free), ("value folded", folded)) if on) or "–")
    return [*cells, ", ".join(groups)]


def main() -> None:
    head = ["model", "class", *COLUMNS, "all at once", "biases"]
    rows = [row(label) for label in MODELS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cells[:-1]) + " |" for cells in rows]
    table = "\n".join(lines)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, seed 1, float64"
    text = [
        "# Every architecture, every symmetry, measured",
        "",
        "Made by `make table`; do not edit. " + (__doc__ or "").split("\n\n")[-1].strip().replace("\n", " "),
        f"({versions})",
        "",
        table,
        "",
        "Groups by axis:",
        "",
        *(f"- **{cells[0]}**: {cells[-1]}" for cells in rows),
        "",
    ]
    (ROOT / "docs/families.md").write_text("\n".join(text), "utf-8")
    readme = ROOT / "README.md"
    start, end = "<!-- families: made by `make table` -->", "<!-- end of families -->"
    body = f"{start}\n{table}\n\n{versions}.\n{end}"
    readme.write_text(re.sub(f"{start}.*{end}", lambda _: body, readme.read_text("utf-8"), flags=re.S), "utf-8")


if __name__ == "__main__":
    main()
