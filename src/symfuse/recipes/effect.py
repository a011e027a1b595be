"""Entries of a recipe without effect. They are reported, not refused, since recipes written for mergekit have them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from symfuse.merging import Method
from symfuse.messages import suggestion
from symfuse.methods import METHODS, lookup
from symfuse.recipes.schema import Input, Recipe, Settings


def without_effect(recipe: Recipe, names: Collection[str]) -> Iterator[str]:
    """A line, with the place, for each parameter that changes nothing: values that the method ignores, values for names
    that no tensor has, values listed after one for all tensors, and those of the base model. names: of all tensors.

    int8_mask is not reported: it saves memory, and never changes the result.
    """
    method = lookup(recipe.merge_method)
    blocks = [recipe.parameters]
    for part in recipe.parts:
        blocks.append(part.parameters)
        for inputs, base in [(part.models, None), *((layers.sources, layers.base_model) for layers in part.slices)]:
            for entry in inputs:
                if method.base != "unused" and entry.model == (base or recipe.base_model):
                    yield from _of_base(entry, method)
                else:
                    blocks.append(entry.parameters)
        blocks += [layers.parameters for layers in part.slices]
    for block in blocks:
        yield from _ignored(block, method)
        yield from _unreached(block, names)


def _of_base(entry: Input, method: Method) -> Iterator[str]:
    for name, setting in entry.parameters.items():
        yield (
            f"{setting.cases[0].place or name}: without effect: {entry.model} is the base model, to which "
            f"{method.name} compares the others; it has no {name}"
        )


def _ignored(block: Settings, method: Method) -> Iterator[str]:
    for name in method.ignored:
        for case in block[name].cases if name in block else ():
            if any(value != method.parameters[name].default for value in case.values):
                others = sorted(m.name for m in METHODS.values() if name in m.parameters and name not in m.ignored)
                yield (
                    f"{case.place or name}: without effect: {method.name} accepts {name} and ignores it; leave it out, "
                    f"or choose a method that uses it ({', '.join(others)})"
                )


def _unreached(block: Settings, names: Collection[str]) -> Iterator[str]:
    for name, setting in block.items():
        for number, case in enumerate(setting.cases):
            place = f"{case.place or name}: without effect"
            before = setting.cases[:number]
            if of_all := next((earlier for earlier in before if earlier.of_all), None):
                first = of_all.place or of_all.values
                yield f"{place}: the first matching value is used, and {first} matches all tensors; list that last"
            elif case.filter is None or case.of_all:
                continue
            elif not (covered := [tensor for tensor in names if case.covers(tensor)]):
                parts = {part for tensor in names for part in tensor.split(".") if not part.isdigit()}
                hint = suggestion(case.filter, parts)
                yield f"{place}: no tensor of these models has {case.filter!r} in its name{hint}"
            elif all(any(earlier.covers(tensor) for earlier in before) for tensor in covered):
                yield f"{place}: values listed before it match all tensors with {case.filter!r} in their names"
