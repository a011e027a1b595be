"""Models and options, as of the command line or of `symfuse.merge`, as a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from symfuse.errors import OptionError
from symfuse.merging import Method
from symfuse.recipes.parser import parse_recipe
from symfuse.recipes.schema import Recipe


def recipe_of(
    models: Sequence[str],
    method: Method,
    base: int | None,
    parameters: Mapping[str, Any],
    keys: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]] = (),
) -> Recipe:
    """base: the number of a model. parameters: one value for all models, or a list with one for each, the base aside if
    the method has one. keys: others of the recipe; None is left out. own: more keys of each model."""
    listed = [model for i, model in enumerate(models) if method.base == "unused" or i != base]
    shared, each = _split(parameters, len(listed))
    blocks = [{"model": m} | ({"parameters": each[i]} if each[i] else {}) for i, m in enumerate(listed)]
    recipe: dict[str, Any] = {
        "merge_method": method.name,
        "models": [block | dict(own[i] if own else {}) for i, block in enumerate(blocks)],
        "parameters": shared,
        "base_model": None if base is None else models[base],
        **keys,
    }
    return parse_recipe({key: value for key, value in recipe.items() if value not in (None, {})}, "the options")


def _split(parameters: Mapping[str, Any], count: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Parameters for all models, and for each one."""
    shared: dict[str, Any] = {}
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in parameters.items():
        if not isinstance(value, list | tuple):
            shared[name] = value
            continue
        if len(value) != count:
            found = f"{len(value)} {name}{'' if len(value) == 1 else 's'} for {count} model{'' if count == 1 else 's'}"
            raise OptionError(f"{found}; give one for each, in the same order")
        for block, one in zip(each, value, strict=True):
            block[name] = one
    return shared, each
