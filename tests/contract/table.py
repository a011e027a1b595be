"""Writes docs/families.md: every architecture × symmetry × measured error.

    make table

Each entry is the largest change of the outputs of the real class, relative to the largest output, in float64 (also
where its class casts to float32), when random elements of that symmetry act (seed 1) on a tiny random model (for
SCEPTR: on a module with its tensors). A dash: the model has no such axis. Biases: "key free", key biases may be
translated; "value folded", value biases may be translated, and the output bias takes up the change.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from contract.tiny import MODELS, case
from symfuse.alignment import random_alignment
from symfuse.spec import anatomy

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "query/key": {"qk", "c", "p"},
    "value/output": {"v"},
    "feed-forward": {"ffn"},
    "experts": {"e"},
    "heads": {"h", "kv", "q"},
    "residual": {"residual", "blocks", "embedding"},
}


Errors = dict[str, float]


def measure(label: str) -> tuple[str, str, Errors, set[str], str]:
    """Family, class, the error of each column, which biases may be translated, and the groups by axis."""
    this = case(label)
    checkpoint, spec = this.checkpoint, this.spec
    errors = {}
    movable = {instance.axis for instance in spec.movable}
    for column, kinds in [*COLUMNS.items(), ("all at once", set(map(anatomy, movable)))]:
        present = {axis for axis in movable if anatomy(axis) in kinds}
        if present:
            acting = None if column == "all at once" else present
            alignment = random_alignment(spec, 1, axes=acting, largest=True)
            errors[column] = this.error(alignment(checkpoint), alignment)
    biases = {"key free" if rule.into is None else "value folded" for rule in spec.shifts}
    groups = sorted({f"{i.axis}: {g.label}" for i in spec.movable if (g := spec.axes[i.axis].group)})
    return spec.family, checkpoint.name, errors, biases, ", ".join(groups)


def in_all_or_some(members: list[set[str]]) -> set[str]:
    """What the biases of a family may do; "(not all)" where it holds for some of its classes only."""
    in_all = set.intersection(*members)
    return in_all | {f"{word} (not all)" for word in set.union(*members) - in_all}


def cells(errors: Errors, biases: set[str]) -> list[str]:
    measured = [f"{errors[c]:.0e}" if c in errors else "–" for c in [*COLUMNS, "all at once"]]
    return [*measured, ", ".join(sorted(biases)) or "–"]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def main() -> None:
    measured = {label: measure(label) for label in MODELS}
    columns = [*COLUMNS, "all at once", "biases"]
    full = [[label, name, *cells(e, b)] for label, (_, name, e, b, _) in measured.items()]
    by_family: dict[str, list[tuple[Errors, set[str]]]] = {}
    for family, _, errors, biases, _ in measured.values():
        by_family.setdefault(family, []).append((errors, biases))
    short = []
    for family, members in by_family.items():
        worst: Errors = {}
        for errors, _ in members:
            worst |= {column: max(error, worst.get(column, 0.0)) for column, error in errors.items()}
        short.append([family, str(len(members)), *cells(worst, in_all_or_some([b for _, b in members]))])
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, seed 1, float64"
    text = [
        "# Measured errors of every symmetry, by architecture",
        "",
        "Made by `make table`; do not edit. " + (__doc__ or "").split("\n\n")[-1].strip().replace("\n", " "),
        f"({versions})",
        "",
        f"## By family: {len(short)} families, {len(full)} models",
        "",
        "The largest error over the classes of each family.",
        "",
        markdown(["model_type", "classes", *columns], short),
        "",
        "## By class",
        "",
        markdown(["model", "class", *columns], full),
        "",
        "## Groups by axis",
        "",
        *(f"- **{label}**: {groups}" for label, (*_, groups) in measured.items()),
        "",
    ]
    (ROOT / "docs/families.md").write_text("\n".join(text), "utf-8")


if __name__ == "__main__":
    main()
