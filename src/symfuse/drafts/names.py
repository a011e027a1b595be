"""Names and shapes of a checkpoint as templates: `layers.{l}.mlp.experts.{e}.w1.weight`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]

_LAYER = re.compile(r"(.*?)(?<![^.])(\d+)\.")  # a name up to its first number
_EXPERT = re.compile(r"(\{l\}.*experts?\.)(\d+)\.")


@dataclass(frozen=True)
class Templates:
    """shapes: by template. layers, experts: how many {l} and {e} stand for, 0 where there is no such. others: by
    template the full names that have another shape, or with None are not there."""

    shapes: Mapping[str, Shape]
    layers: int
    experts: int
    others: Mapping[str, Mapping[str, Shape | None]]


@dataclass(frozen=True)
class Part:
    """A parsed template. module: without the kind of the tensor; words: its parts, in lower case."""

    template: str
    shape: Shape
    module: str
    kind: Literal["weight", "bias"]

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.module.lower().split("."))

    @property
    def leaf(self) -> str:
        return self.words[-1]

    @property
    def layered(self) -> bool:
        """Whether it is in a layer: of the stack, or one that is run several times."""
        return re.search(r"\{l\}|\.\d+\.", self.template) is not None


def templates(shapes: Mapping[str, Shape], layers: int | None) -> Templates:
    """The templates of these tensors. layers: as config.json counts them: the stack of one layer is one if it says so.

    The stack of layers is the list that has most tensors; numbers elsewhere stay as they are.
    """
    stack, size = _stack(shapes, layers)
    named = {name: _template(name, stack) for name in shapes}
    indices = {int(m[2]) for text, _ in named.values() if (m := _EXPERT.search(text))}
    experts = len(indices) if indices == set(range(len(indices))) and len(indices) > 1 else 0
    shapes_of: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, (text, _) in named.items():
        shapes_of[_EXPERT.sub(r"\1{e}.", text) if experts else text][name] = shapes[name]
    usual = {text: Counter(named.values()).most_common(1)[0][0] for text, named in shapes_of.items()}
    others: dict[str, dict[str, Shape | None]] = {}
    for text, have in shapes_of.items():
        filled = [text.replace("{l}", str(i)) for i in range(size)] if "{l}" in text else [text]
        filled = [n.replace("{e}", str(i)) for n in filled for i in range(experts)] if "{e}" in text else filled
        if odd := {name: have.get(name) for name in filled if have.get(name) != usual[text]}:
            others[text] = odd
    return Templates(usual, size, experts, others)


def _stack(names: Mapping[str, Shape], layers: int | None) -> tuple[str, int]:
    """The prefix of the names of layers, and the number of layers."""
    stacks: dict[str, list[int]] = defaultdict(list)
    for name in names:
        if match := _LAYER.match(name):
            stacks[match[1]].append(int(match[2]))
    whole = {
        at: len(set(numbers))
        for at, numbers in stacks.items()
        if set(numbers) == set(range(len(set(numbers)))) and (len(set(numbers)) > 1 or layers == 1)
    }
    at = max(whole, key=lambda one: len(stacks[one]), default="")
    return at, whole.get(at, 0)


def _template(name: str, stack: str) -> tuple[str, int]:
    match = _LAYER.match(name)
    if not stack or match is None or match[1] != stack:
        return name, -1
    return f"{stack}{{l}}.{name[match.end() :]}", int(match[2])


def part(template: str, shape: Shape) -> Part:
    *before, last = template.split(".")
    kind: Literal["weight", "bias"] = "bias" if "bias" in last or last == "beta" else "weight"
    if last in ("weight", "bias", "gamma", "beta"):
        return Part(template, shape, ".".join(before), kind)
    stem, _, end = last.rpartition("_")
    return Part(template, shape, ".".join([*before, stem if end in ("weight", "bias") else last]), kind)
