"""The axes of every declared family that may be transformed, those that may not, and why, from the declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from symfuse.architectures import ARCHITECTURES, Config, Family
from symfuse.groups import GROUPS
from symfuse.io.installed import quiet
from symfuse.model.reasons import MEANING, ONCE_FOLDED, reason
from symfuse.spec import Axis, parse
from symfuse.spec.spec import anatomy


def families() -> list[dict[str, Any]]:
    """Every declared family by name, for its usual config: the default one of `transformers`, updated by the family's
    example, or the example alone. By axis the group, and why no larger one acts; translations of biases; for pre-norm
    models the group of the residual stream once the gains are folded.

    Options of a config may change this: `symfuse inspect MODEL` shows one model.
    """
    return [_family(name) for name in sorted(ARCHITECTURES)]


def _family(model_type: str) -> dict[str, Any]:
    declared = ARCHITECTURES[model_type].declare(Config(_usual_config(model_type), model_type))
    axes = [_axis(name, axis) for name, axis in _used(declared).items()]
    free = {rule.axis for rule in declared.shifts if rule.into is None}
    folded = {rule.axis for rule in declared.shifts if rule.into is not None}
    stream = any("residual" in declared.tensors.get(gain, "") for gain in declared.reads)
    return {
        "family": model_type,
        "moved": [axis for axis in axes if axis["group"] is not None],
        "not_moved": [axis for axis in axes if axis["group"] is None],
        "biases": [*(["keys free"] if free else []), *(["values move on into the output"] if folded else [])],
        "residual_once_folded": GROUPS[ONCE_FOLDED[declared.norm]].label if stream else None,
    }


def _usual_config(model_type: str) -> dict[str, Any]:
    import transformers

    example = {"model_type": model_type, **(ARCHITECTURES[model_type].example or {})}
    if model_type not in transformers.CONFIG_MAPPING:
        return example
    with quiet():
        config = transformers.CONFIG_MAPPING[model_type]().to_dict() | example
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}


def _used(family: Family) -> dict[str, Axis]:
    """The axes that occur in layouts, in the order of the declaration."""
    layouts = [*family.tensors.values(), *(text for part in family.optional.values() for text in part.values())]
    layouts += [text for head in family.heads.values() for text in head.tensors.values()]
    used = {axis for text in layouts if text for axis in parse(text).names}
    return {name: axis for name, axis in family.axes.items() if name in used}


def _axis(name: str, axis: Axis) -> dict[str, Any]:
    return {
        "axis": name,
        "what": MEANING.get(anatomy(name), ""),
        "group": None if axis.group is None else axis.group.label,
        "per": list(axis.per),
        "why": reason(name, axis),
    }


def rows(result: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of families, with the axes that are transformed and those that are not; equal families share a row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for one in result:
        moved = [f"{axis['axis']}: {axis['group']}" for axis in one["moved"]]
        if one["residual_once_folded"]:
            moved.append(f"residual once norms are folded: {one['residual_once_folded']}")
        stays = ", ".join(axis["axis"] for axis in one["not_moved"])
        alike.setdefault(("; ".join(moved), stays, ", ".join(one["biases"])), []).append(one["family"])
    return [[", ".join(names), *(cell or "–" for cell in cells)] for cells, names in alike.items()]


def reasons(result: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of axis, meaning, group and reason, with the families that they apply to."""
    by: dict[tuple[str, str, str, str], list[str]] = {}
    having: dict[str, set[str]] = {}
    for one in result:
        for axis in [*one["moved"], *one["not_moved"]]:
            key = (axis["axis"], axis["what"], axis["group"] or "not moved", axis["why"])
            by.setdefault(key, []).append(one["family"])
            having.setdefault(axis["axis"], set()).add(one["family"])
    return [
        [*key, "all that have it" if set(names) == having[key[0]] and len(names) > 1 else ", ".join(names)]
        for key, names in sorted(by.items(), key=lambda item: (item[0][2] == "not moved", item[0]))
    ]


ROWS = ("model_type", "moved", "not moved", "biases")
REASONS = ("axis", "what it is", "group", "why no more", "families")


def markdown(result: Sequence[Mapping[str, Any]]) -> str:
    """The page of the docs: both tables."""

    def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
        return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])

    return "\n".join(
        [
            "# What is aligned in each family, what is not, and why",
            "",
            "Made by `make moved` from the declarations, each on its family's usual config; do not edit.",
            "`symfuse inspect --families` prints the same. Other settings of a config may change it:",
            "`symfuse inspect MODEL` shows one model. Measured errors: [families.md](families.md). Proofs:",
            "[symmetries.md](symmetries.md). Words: [glossary.md](glossary.md).",
            "",
            '"moved" lists the axes that an alignment may transform, with the largest group that may act on each.',
            "",
            table(ROWS, rows(result)),
            "",
            "## Why",
            "",
            table(REASONS, reasons(result)),
            "",
        ]
    )
