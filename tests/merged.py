"""The merge of models with what a method learned, as a recipe plans it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from symfuse.io import Checkpoint
from symfuse.methods import Fitted, lookup
from symfuse.model import Model
from symfuse.recipes import ModelRef, named, recipe_of_arguments
from symfuse.recipes.plan import plan_recipe


def merge_models(
    models: Sequence[Model],
    method: str = "linear",
    base: int | None = None,
    heads: str = "average",
    learned: Fitted | None = None,
    **parameters: Any,
) -> Checkpoint:
    names = list(named([model.checkpoint for model in models]))
    how: dict[str, Any] = {"heads": heads, "dtype": None, "seed": 0, "force_config": False}
    recipe = recipe_of_arguments(names, lookup(method), base, parameters, **how)
    known = {
        ModelRef(name): replace(model, checkpoint=model.checkpoint.replace(name=name))
        for name, model in zip(names, models, strict=True)
    }
    return plan_recipe(recipe, known, learned=learned)
