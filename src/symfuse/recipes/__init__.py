"""Merge recipes: a validated superset of mergekit's YAML. A file may hold several, which name each other."""

from __future__ import annotations

from symfuse.recipes.documents import read_recipes
from symfuse.recipes.effect import without_effect
from symfuse.recipes.options import recipe_of
from symfuse.recipes.parser import parse_recipe
from symfuse.recipes.schema import (
    Align,
    Data,
    Input,
    ModelRef,
    Module,
    Recipe,
    Slice,
    Tokenizer,
    TokenSource,
    settings_for,
)
from symfuse.recipes.settings import Case, Setting

__all__ = [
    "Align",
    "Case",
    "Data",
    "Input",
    "ModelRef",
    "Module",
    "Recipe",
    "Setting",
    "Slice",
    "TokenSource",
    "Tokenizer",
    "parse_recipe",
    "read_recipes",
    "recipe_of",
    "settings_for",
    "without_effect",
]
