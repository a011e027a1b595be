"""Several recipes in one file, which refer to each other's results by name."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from symfuse.errors import OptionError
from symfuse.files import regular
from symfuse.messages import suggestion
from symfuse.recipes.parser import read_recipe
from symfuse.recipes.schema import Recipe
from symfuse.recipes.yaml_reader import Document, read_documents


def read_recipes(path: str | PathLike[str]) -> tuple[Recipe, ...]:
    """The recipes of a file, each after those whose results it merges, the one without a name last.

    Raises OptionError, with file, line and path, for all that `parse_recipe` refuses; for a file that cannot be read;
    and for names that are duplicated, unknown, or depend on each other.
    """
    where, path = str(path), Path(path)
    try:
        text = regular(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise OptionError(f"{where}: the recipe cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{where}: not UTF-8 text (byte {error.start}); is it a recipe?") from None
    documents = read_documents(text, where)
    if not documents:
        raise OptionError(f"{where}: the recipe is empty")
    recipes: dict[str | None, Recipe] = {}
    for document in documents:
        recipe = read_recipe(document)
        if recipe.name in recipes:
            _refuse_second(document, recipe.name)
        recipes[recipe.name] = recipe
    _refuse_misspelt(recipes, where, path.parent)
    return tuple(_in_order(recipes, where))


def _refuse_second(document: Document, name: str | None) -> None:
    if name is None:
        document.root.fail("a second recipe without `name`; all but the last one need a name")
    document.root.mapping()["name"].fail(f"a second recipe of the name {name!r}")


def _named(recipe: Recipe) -> list[str]:
    """The paths of all models that a recipe reads; some may be names of other recipes."""
    refs = [*recipe.models_used(), *(recipe.tokenizer.models_used() if recipe.tokenizer else ())]
    return list(dict.fromkeys(ref.path for ref in refs))


def _refuse_misspelt(recipes: dict[str | None, Recipe], where: str, folder: Path) -> None:
    """OptionError for a word that is no folder, and nearly the name of another recipe: it is no hub id either."""
    names = [name for name in recipes if name is not None]
    for recipe in recipes.values():
        for path in _named(recipe):
            hint = suggestion(path, (name for name in names if name != recipe.name))
            bare = path not in names and "/" not in path and "\\" not in path
            if bare and hint and not Path(path).exists() and not (folder / path).exists():
                raise OptionError(
                    f"{where}: {_called(recipe)} needs {path!r}, which is no recipe of this file and no folder{hint}"
                )


def _in_order(recipes: dict[str | None, Recipe], where: str) -> Iterator[Recipe]:
    done: set[str | None] = set()

    def after(name: str | None, chain: tuple[str | None, ...]) -> Iterator[Recipe]:
        if name in chain:
            loop = " → ".join(str(part) for part in (*chain[chain.index(name) :], name))
            raise OptionError(f"{where}: recipes depend on each other: {loop}")
        if name in done:
            return
        for path in _named(recipes[name]):
            if path in recipes:
                yield from after(path, (*chain, name))
        done.add(name)
        yield recipes[name]

    for name in sorted(recipes, key=lambda name: name is None):
        yield from after(name, ())


def _called(recipe: Recipe) -> str:
    return "the recipe without a name" if recipe.name is None else f"the recipe {recipe.name!r}"
