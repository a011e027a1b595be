"""Merge recipes: a validated superset of mergekit's YAML. A file may hold several, which name each other."""

from __future__ import annotations

from symfuse.recipes.documents import read_recipes
from symfuse.recipes.effect import without_effect
from symfuse.recipes.options import RECIPE_KEYS, named, plain, recipe_of, recipe_of_arguments
from symfuse.recipes.parser import parse_recipe
from symfuse.recipes.schema import (
    Align,
    Case,
    Data,
    Input,
    ModelRef,
    Module,
    Recipe,
    Setting,
    Slice,
    Tokenizer,
    settings_for,
)

__all__ = [
    "RECIPE_KEYS", "Align", "Case", "Data", "Input", "ModelRef", "Module", "Recipe", "Setting", "Slice",
    "Tokenizer", "named", "parse_recipe", "plain", "read_recipes", "recipe_of", "recipe_of_arguments", "settings_for",
    "without_effect",
]  # fmt: skip
