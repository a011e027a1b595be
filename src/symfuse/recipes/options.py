"""A recipe from models and options, of the command line or of `symfuse.merge`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from symfuse.errors import OptionError
from symfuse.io import Checkpoint
from symfuse.merging import Method
from symfuse.recipes.parser import parse_recipe
from symfuse.recipes.schema import COPY, Recipe, kept_head

# Keys of recipes that are neither parameters of a method nor arguments of `symfuse.merge`.
RECIPE_KEYS = frozenset({
    "align", "base_model", "chat_template", "foreign", "merge_method", "missing_bias", "models", "modules", "name",
    "out_dtype", "slices", "tokenizer", "tokenizer_source",
})  # fmt: skip


def recipe_of(
    models: Sequence[Any],
    method: Method,
    base: int | None,
    parameters: Mapping[str, Any],
    keys: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]] = (),
    *,
    kind: str = "model",
) -> Recipe:
    """models: as written in recipes. base: the index of one. parameters: one value for all models, or a list with one
    for each, without the base if the method has one. keys: more keys of the recipe; None is left out. own: more keys
    of each model. kind: "adapter" for folders of adapters."""
    listed = [model for i, model in enumerate(models) if method.base == "unused" or i != base]
    shared, each = _split(parameters, len(listed))
    blocks = [{kind: m} | ({"parameters": each[i]} if each[i] else {}) for i, m in enumerate(listed)]
    recipe: dict[str, Any] = {
        "merge_method": method.name,
        "models": [block | dict(own[i] if own else {}) for i, block in enumerate(blocks)],
        "parameters": shared,
        "base_model": None if base is None else models[base],
        **keys,
    }
    return parse_recipe({key: value for key, value in recipe.items() if value not in (None, {})}, "the options")


def named(checkpoints: Sequence[Checkpoint]) -> dict[str, Checkpoint]:
    """The models by unique names for a recipe: of several with one name, all but the first are called copies."""
    known: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:
        name = checkpoint.name if checkpoint.name.strip() else "model"
        same = sum(name == other.partition(COPY)[0] for other in known)
        known[f"{name}{COPY}{same})" if same else name] = checkpoint
    return known


def recipe_of_arguments(
    names: Sequence[str],
    method: Method,
    base: int | None,
    parameters: Mapping[str, Any],
    *,
    heads: str | int,
    dtype: object,
    seed: int,
    force_config: bool,
) -> Recipe:
    """The recipe of these arguments of `symfuse.merge`, for models by name."""
    if not names:
        raise OptionError("a merge needs models; none are given")
    if base is not None and not 0 <= base < len(names):
        raise OptionError(f"base {base}: there are models 0 to {len(names) - 1}")
    head = _head(heads, names)
    if base is None and head in names and method.base != "required":
        base = names.index(head)
    keys = {
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "heads": head,
        "force_config": force_config or None,
        "seed": seed or None,
    }
    return recipe_of([_written(name) for name in names], method, base, plain(parameters), keys)


def _head(heads: str | int, names: Sequence[str]) -> str:
    """The name of the model whose head is kept, or "average" or "drop"."""
    if isinstance(heads, int):
        if 0 <= heads < len(names):
            return names[heads]
        raise OptionError(
            f"heads {heads}: there are models 0 to {len(names) - 1}; or write 'average', 'drop' or a model's name"
        )
    kept = kept_head(heads, names)
    return heads if kept is None else names[kept]


def _written(name: str) -> Any:
    """A model as written in a recipe: a name with + or @, or with spaces around it, as a path."""
    return {"model": {"path": name}} if set("+@") & set(name) or name != name.strip() else name


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """With `_plain` values."""
    return {name: _plain(value) for name, value in parameters.items()}


def _plain(value: Any) -> Any:
    """Tensors, arrays and their scalars as Python values, tuples as lists."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _split(parameters: Mapping[str, Any], count: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Parameters for all models, and for each one."""
    shared: dict[str, Any] = {}
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in parameters.items():
        if not isinstance(value, list | tuple):
            shared[name] = value
            continue
        if len(value) != count:
            names = name if len(value) == 1 or name.endswith("s") else f"{name}s"
            models = f"{count} model{'' if count == 1 else 's'}"
            raise OptionError(f"{len(value)} {names} for {models}; give one for each, in the same order")
        for block, one in zip(each, value, strict=True):
            block[name] = one
    return shared, each
