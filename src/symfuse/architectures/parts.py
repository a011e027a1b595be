"""Families made from others: as a part of a model (the towers of CLIP, what a vision–language model consists of), or
under other names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import reduce

from symfuse.architectures.base import Family, Head
from symfuse.architectures.blocks import renamed, replaced
from symfuse.spec import Axis, Shift


def part_of(family: Family, at: str, part: str = "", shared: Collection[str] = (), *, last: bool = False) -> Family:
    """A family as a part of another model: `at` stands before the names of its tensors, and `part_` before those of its
    axes, but for the shared ones. What it puts out, and what of that reads a norm, is for the whole to say, unless it
    is the last part, whose outputs, heads and ties are those of the whole."""

    def axis(name: str) -> str:
        return f"{part}_{name}" if part and name in family.axes and name not in shared else name

    def layout(text: str) -> str:
        return re.sub(r"[A-Za-z_]\w*", lambda match: axis(match[0]), text)

    ends = {name for head in family.heads.values() for name in head.tensors} | set(family.outputs)

    def name(template: str) -> str:
        if template in ends and template not in family.tensors:
            return template
        return at + re.sub(r"{(\w+)}", lambda match: f"{{{axis(match[1])}}}", template)

    def in_part(shift: Shift) -> Shift:
        names = (None if one is None else name(one) for one in (shift.weight, shift.into))
        return Shift(name(shift.bias), layout(shift.axis), *names)

    def axes(of: Mapping[str, Axis]) -> dict[str, Axis]:
        return {axis(key): replace(one, per=tuple(map(axis, one.per))) for key, one in of.items()}

    def head(one: Head) -> Head:
        return replace(one, tensors={template: layout(text) for template, text in one.tensors.items()})

    reads = {norm: [one for one in of if last or one not in family.outputs] for norm, of in family.reads.items()}
    return Family(
        axes=axes(family.axes),
        tensors={name(template): layout(text) for template, text in family.tensors.items()},
        heads={label: head(one) for label, one in family.heads.items()} if last else {},
        tied={name(alias): name(tensor) for alias, tensor in family.tied.items()} if last else {},
        outputs={field: layout(text) for field, text in family.outputs.items()} if last else {},
        stacks={name(stack): tuple(map(name, pieces)) for stack, pieces in family.stacks.items()},
        buffers=tuple(f"*{pattern}" if not pattern.startswith("*") else pattern for pattern in family.buffers),
        shifts=tuple(map(in_part, family.shifts)),
        reads={name(norm): tuple(map(name, readers)) for norm, readers in reads.items() if readers},
        norm=family.norm,
        scales={name(gain): name(writer) for gain, writer in family.scales.items()},
        gauges={name(reader): name(gain) for reader, gain in family.gauges.items()},
    )


def together(*parts: Family) -> Family:
    """The parts as one family."""

    def both(one: Family, other: Family) -> Family:
        names = ("axes", "tensors", "reads", "scales", "gauges", "stacks")
        whole = one.plus(**{name: getattr(other, name) for name in names})
        return replace(whole, buffers=one.buffers + other.buffers, shifts=one.shifts + other.shifts)

    return reduce(both, parts)


def called(family: Family, prefix: str, names: Mapping[str, str]) -> Family:
    """A family with another prefix and other names, of which pieces are replaced in the order of `names`."""

    def name(old: str) -> str:
        return replaced(old, names)

    def shift(old: Shift) -> Shift:
        weight, into = (None if one is None else name(one) for one in (old.weight, old.into))
        return Shift(name(old.bias), old.axis, weight, into)

    def both(pairs: Mapping[str, str]) -> dict[str, str]:
        return {name(one): name(other) for one, other in pairs.items()}

    return replace(
        family,
        prefix=prefix,
        tensors=renamed(family.tensors, names),
        optional={part: renamed(tensors, names) for part, tensors in family.optional.items()},
        heads={label: replace(head, tensors=renamed(head.tensors, names)) for label, head in family.heads.items()},
        tied=both(family.tied),
        shifts=tuple(map(shift, family.shifts)),
        reads={name(norm): tuple(map(name, readers)) for norm, readers in family.reads.items()},
        scales=both(family.scales),
        gauges=both(family.gauges),
    )
