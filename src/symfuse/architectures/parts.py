"""Families as parts of a model: the towers of CLIP, what a vision–language model consists of."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import reduce

from symfuse.architectures.base import Family


def part_of(family: Family, at: str, part: str = "", shared: Collection[str] = (), *, last: bool = False) -> Family:
    """A family as a part of another model: `at` stands before the names of its tensors, and `part_` before those of its
    axes, but for the shared ones. What it puts out, and what of that reads a norm, is for the whole to say, unless it
    is the last part, whose outputs, heads and ties are those of the whole."""

    def axis(name: str) -> str:
        return f"{part}_{name}" if part and name in family.axes and name not in shared else name

    ends = {name for head in family.heads.values() for name in head.tensors} | set(family.outputs)

    def name(template: str) -> str:
        if template in ends and template not in family.tensors:
            return template
        return at + re.sub(r"{(\w+)}", lambda match: f"{{{axis(match[1])}}}", template)

    reads = {norm: tuple(one for one in of if last or one not in family.outputs) for norm, of in family.reads.items()}
    kept = {norm: readers for norm, readers in reads.items() if readers}
    buffers = tuple(f"*{pattern}" if not pattern.startswith("*") else pattern for pattern in family.buffers)
    whole = replace(family, reads=kept, buffers=buffers, prefix="", optional={}, absent={}, legacy={}, predictors={})
    return (whole if last else replace(whole, heads={}, tied={}, outputs={})).mapped(name, axis)


def together(*parts: Family) -> Family:
    """The parts as one family."""

    def both(one: Family, other: Family) -> Family:
        names = ("axes", "tensors", "reads", "scales", "gauges", "stacks")
        whole = one.plus(**{name: getattr(other, name) for name in names})
        return replace(whole, buffers=one.buffers + other.buffers, shifts=one.shifts + other.shifts)

    return reduce(both, parts)
