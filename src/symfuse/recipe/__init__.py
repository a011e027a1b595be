"""Merge recipes: a validated superset of mergekit's YAML. A file may hold several, which name each other."""

from __future__ import annotations

from symfuse.recipe.documents import read_recipes
from symfuse.recipe.effect import without_effect
from symfuse.recipe.model import (
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
from symfuse.recipe.options import recipe_of
from symfuse.recipe.parser import parse_recipe
from symfuse.recipe.settings import Case, Setting

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
